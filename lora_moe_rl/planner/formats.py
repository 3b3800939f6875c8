"""Bytes of weights in the formats that checkpoints come in."""

from __future__ import annotations

import math

from lora_moe_rl.planner.base import BaseTensor
from lora_moe_rl.planner.facts import Format

FP8_BLOCK = 128  # one float32 scale for each block of 128 by 128
INT4_GROUP = 32  # one bf16 scale for each 32 weights of a row
SCRATCH_BYTES = 2**32  # most that the trainer dequantises experts into (kernels/packed_linear.py)


def itemsize(weights: Format) -> int:
    """Bytes of a number that is not quantised, and of an activation."""
    return 4 if weights == "float32" else 2


def scratch_bytes(shape: tuple[int, ...], weights: Format) -> int:
    """What a trainer rank dequantises its experts `[E, out, in]` of a layer into."""
    if weights not in ("fp8", "int4"):
        return 0
    experts, one = shape[0], itemsize(weights) * math.prod(shape[1:])
    return one * min(experts, max(1, SCRATCH_BYTES // one))


def tensor_bytes(tensor: BaseTensor, shape: tuple[int, ...], weights: Format) -> int:
    """Bytes of a part of `shape` of `tensor`.

    fp8: every matrix of a layer but the router's, as DeepSeek-V3 has it; int4: the routed experts,
    as Kimi-K2-Thinking has it; the rest is bf16.
    """
    size = math.prod(shape)
    if tensor.buffer:
        return 4 * size
    if weights == "fp8" and tensor.linear:
        rows, columns = shape[-2:]
        blocks = math.ceil(rows / FP8_BLOCK) * math.ceil(columns / FP8_BLOCK)
        return size + 4 * math.prod(shape[:-2]) * blocks
    if weights == "int4" and tensor.part == "experts":
        return size // 2 + 2 * math.ceil(size / INT4_GROUP)
    return itemsize(weights) * size
