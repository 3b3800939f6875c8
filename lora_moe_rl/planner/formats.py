"""Bytes of weights in the formats that checkpoints come in, and in those that trainers hold."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.planner.base import BaseTensor
from lora_moe_rl.planner.facts import PACKED, Format

FP8_BLOCK = 128  # one float32 scale for each block of 128 by 128
GROUP = 32  # weights of a row that have one scale, of two bytes in INT4 and one in MXFP4
# The most that the trainer dequantises weights of one shape into (kernels/packed_linear.py).
SCRATCH_BYTES = {"cpu": 2**28, "cuda": 2**32}


def itemsize(weights: Format) -> int:
    """Bytes of a number that is not quantised, and of an activation."""
    return 4 if weights == "float32" else 2


def scratch_bytes(shapes: Iterable[tuple[int, ...]], weights: Format, device: str) -> int:
    """Buffers that a trainer rank dequantises weights `[out, in]`, or experts `[E, out, in]` of a
    layer, in: one for each shape."""
    room, buffers = SCRATCH_BYTES["cpu" if device == "cpu" else "cuda"], set()
    for *stack, rows, columns in shapes:
        at_once = max(1, room // (itemsize(weights) * rows * columns))
        buffers.add((min(math.prod(stack), at_once), rows, columns))
    return itemsize(weights) * sum(map(math.prod, buffers))


def packed_in_trainer(
    tensor: BaseTensor, shape: tuple[int, ...], weights: Format, trainer: TrainerConfig
) -> bool:
    """Whether a trainer rank keeps a part of `shape` of `tensor` as the checkpoint has it: routed
    experts, and what trainer/packed_dense.py packs. On GPUs Transformer Engine's linears are
    numbers."""
    if tensor.part == "experts" or weights != "fp8":
        return tensor.part == "experts" and weights in PACKED
    if not tensor.linear or trainer.device != "cpu" or tensor.name.endswith("linear_qkv.weight"):
        return False
    gate_and_up = 2 if tensor.name.endswith("linear_fc1.weight") else 1
    return all(
        shape[side] % (gate_and_up * FP8_BLOCK) == 0
        for side, _ in tensor.split
        if gate_and_up > 1 or shape[side] < tensor.shape[side]
    )


def trainer_bytes(
    tensor: BaseTensor, shape: tuple[int, ...], weights: Format, trainer: TrainerConfig
) -> int:
    """Bytes of a part of `shape` of `tensor` on a trainer rank."""
    if packed_in_trainer(tensor, shape, weights, trainer) or tensor.buffer:
        return tensor_bytes(tensor, shape, weights)
    return itemsize(weights) * math.prod(shape)


def tensor_bytes(tensor: BaseTensor, shape: tuple[int, ...], weights: Format) -> int:
    """Bytes of a part of `shape` of `tensor`.

    fp8: every matrix of a layer but the router's, as DeepSeek-V3 has it; int4 and mxfp4: the
    routed experts, as Kimi-K2-Thinking has it; the rest is bf16.
    """
    size = math.prod(shape)
    if tensor.buffer:
        return 4 * size
    if weights == "fp8" and tensor.linear:
        rows, columns = shape[-2:]
        blocks = math.ceil(rows / FP8_BLOCK) * math.ceil(columns / FP8_BLOCK)
        return size + 4 * math.prod(shape[:-2]) * blocks
    if weights in ("int4", "mxfp4") and tensor.part == "experts":
        return size // 2 + (2 if weights == "int4" else 1) * math.ceil(size / GROUP)
    return itemsize(weights) * size
