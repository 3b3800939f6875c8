"""A part of an adapter version that never leaves the devices: its checks are made there.

A checksum of xxh3 would want every byte on the host, over the bus that such a part is to be spared.
A box's checksum is instead a sum of its bits, mixed with their places (`kernels/bit_sums.py`), of
which the host reads 8 bytes: sender and receiver each read the part once more, and write some ten
times its bytes in between. Any change within one word of 32 bits is found for certain, and any
other but for one chance in 2^64; it is no defence against who means to deceive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_moe_rl.kernels.bit_sums import bit_sum


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Whether no value is NaN or infinite, bool on the values' device."""
    return torch.isfinite(values).all()


def checksums(boxes: Sequence[torch.Tensor]) -> list[int]:
    """The checksum of each box, given as a contiguous tensor. Waits for their device, once."""
    sums = torch.stack([bit_sum(box) for box in boxes]).tolist() if boxes else []
    return [one % 2**64 for one in sums]
