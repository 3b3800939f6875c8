"""Which implementation a kernel call uses, Triton or plain torch; and how it gets what the host
knows."""

from __future__ import annotations

import os
from collections.abc import Sequence

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


def on_device(values: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """Values of the host on `device`, without waiting for it. A copy from pages that are not locked
    waits until a GPU has done all that it was given before; torch makes one of a strided tensor."""
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=None if len(values) else torch.int64)
    if device.type == "cuda" and not values.is_cuda:
        return values.contiguous().pin_memory().to(device, non_blocking=True)
    return values.to(device)
