"""Benchmarks that are commands of their own, on this device."""

from __future__ import annotations

from typing import Any

from lora_moe_rl.bench.gpu.parts import Parts

# Tokens before top-k, and ranks.
KERNEL_SIZES = {"cuda": ((4096, 32768), (32,)), "cpu": ((16,), (8,))}
REFIT_ROUNDS = {"cuda": 5, "cpu": 1}


def run(parts: Parts, device: str, which: str) -> None:
    if which == "refit":
        parts.part("refit", lambda: refit(device))
        return
    from lora_moe_rl.bench.kernel_contenders import SHAPES
    from lora_moe_rl.bench.kernels import require_right

    # Once: none of the figures is worth anything without it.
    if parts.part("gate", lambda: require_right(device)):
        for shape in SHAPES:
            parts.part(shape, lambda shape=shape: kernels(shape, device))


def kernels(shape: str, device: str) -> dict[str, Any]:
    """`bench kernels --shape SHAPE`, without its gate."""
    from lora_moe_rl.bench.kernels import figures

    tokens, ranks = KERNEL_SIZES[device]
    return figures([shape], device, tokens, ranks)


def refit(device: str) -> dict[str, Any]:
    """`bench refit`, beside its goals."""
    from lora_moe_rl.bench.refit import judged

    return judged(REFIT_ROUNDS[device], "ep2")
