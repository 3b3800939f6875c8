"""Which implementation a kernel call uses: Triton, or plain torch."""

from __future__ import annotations

import os

import torch

from lora_moe_rl.errors import ConfigError

KERNELS = ("auto", "triton", "torch")


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def resolve(kernel: str, device: torch.device) -> str:
    """`triton` or `torch` for tensors on `device`. auto: Triton on CUDA, torch elsewhere.

    Raises ConfigError for another name, and for Triton where it cannot run.
    """
    if kernel not in KERNELS:
        raise ConfigError(f"kernel={kernel!r} is none of {', '.join(KERNELS)}")
    if kernel == "triton" and device.type not in ("cuda", "meta") and not interpreting():
        raise ConfigError(
            f"kernel='triton' cannot run on tensors on the device {device}: use kernel='torch' or "
            "'auto' there, or set TRITON_INTERPRET=1 before Python starts to run Triton's "
            "interpreter (slow, for tests)"
        )
    if kernel == "auto":
        return "triton" if device.type == "cuda" else "torch"
    return kernel
