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

    for shape in SHAPES:
        parts.part(shape, lambda shape=shape: kernels(shape, device))


def kernels(shape: str, device: str) -> dict[str, Any]:
    """`bench kernels --shape SHAPE`, whose gate comes first."""
    from lora_moe_rl.bench.kernels import measure

    tokens, ranks = KERNEL_SIZES[device]
    return measure([shape], device, tokens, ranks)


def refit(device: str) -> dict[str, Any]:
    """`bench refit`, beside its goals."""
    from lora_moe_rl.bench.refit import judged

    return judged(REFIT_ROUNDS[device], "ep2")
