"""`kernels/grouped_linear.py` with quantised weights: dequantised into a buffer that all layers
share, multiplied there, and forgotten. What is kept for the backward is what the checkpoint has.

    y[t] = x[t] W[e(t)]^T        W = dequantise(packed), in x's dtype
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.kernels.dequant import Packed, dequantise_
from lora_moe_rl.kernels.grouped_lora.torch_path import grouped

# Bytes of the buffer at most, unless one expert is larger. A layer that fits is dequantised once
# for its recomputed forward and its backward; another in groups of experts, for each of them.
SCRATCH_BYTES = {"cpu": 2**28, "cuda": 2**32}


@dataclass
class Scratch:
    """Buffers for dequantised weights, one for each shape, and whose weights stand in them."""

    buffers: dict[tuple, Tensor] = field(default_factory=dict)
    holds: dict[tuple, tuple[Tensor, int, slice]] = field(default_factory=dict)

    def weight(self, packed: Packed, experts: slice, dtype: torch.dtype) -> Tensor:
        """The experts' weights `[e, out, in]`, until the next call."""
        wanted = packed.of(experts)
        device = packed.data.device
        key = (packed.shape[1:], _in_scratch(packed, dtype), dtype, device)
        buffer = self.buffers.get(key)
        if buffer is None:
            self.buffers[key] = buffer = torch.empty(
                key[1], *packed.shape[1:], dtype=dtype, device=device
            )
        weight = buffer[: wanted.shape[0]]
        held, owner = self.holds.pop(key, None), (packed.data, packed.data._version, experts)
        if held is None or held[0] is not packed.data or held[1:] != owner[1:]:
            dequantise_(wanted, weight)
        self.holds[key] = owner
        return weight

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())


SCRATCH = Scratch()


def packed_linear(x: Tensor, packed: Packed, counts: Sequence[int]) -> Tensor:
    """x `[T, in]` sorted by expert, packed of shape `[E, out, in]`, counts: tokens of each expert,
    known to the host. Returns `[T, out]` in x's dtype. Gradients flow to x."""
    return _PackedLinear.apply(x, packed, list(counts))


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, counts):
        ctx.packed, ctx.counts = packed, counts
        return _multiplied(x, packed, counts, transposed=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        dx = _multiplied(dy, ctx.packed, ctx.counts, transposed=False)
        return dx, None, None


def _multiplied(x: Tensor, packed: Packed, counts, transposed: bool) -> Tensor:
    """`x[t] W[e(t)]`, or W^T."""
    parts = []
    for experts, tokens in _groups(packed, counts, x.dtype):
        weight = SCRATCH.weight(packed, experts, x.dtype)
        of_experts = on_device(counts[experts], x.device)
        parts.append(grouped(x[tokens], weight.mT if transposed else weight, of_experts))
    if not parts:
        return x.new_empty(0, packed.shape[-2 if transposed else -1])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _groups(packed: Packed, counts, dtype: torch.dtype) -> Iterator[tuple[slice, slice]]:
    """(experts, their tokens) that fit the buffer and have tokens."""
    size, start = _in_scratch(packed, dtype), 0
    for first in range(0, len(counts), size):
        experts = slice(first, min(first + size, len(counts)))
        if held := sum(counts[experts]):
            yield experts, slice(start, start + held)
            start += held


def _in_scratch(packed: Packed, dtype: torch.dtype) -> int:
    """How many experts of a stack the buffer holds."""
    E, out, in_features = packed.shape
    room = SCRATCH_BYTES[packed.data.device.type] // (out * in_features * dtype.itemsize)
    return min(max(room, 1), E)
