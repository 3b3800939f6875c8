"""Launches of the Triton route codec."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lora_moe_rl.kernels.route_codec import triton_kernels as kernels
from lora_moe_rl.kernels.route_codec.layout import RowLayout

_BLOCK = 1024
_MAP_ELEMENTS = 4096  # of a program's tile of the routing map


def pack(ids: Tensor, layout: RowLayout) -> Tensor:
    ids = ids.contiguous()
    packed = ids.new_empty(ids.shape[0], layout.row_bytes, dtype=torch.uint8)
    if packed.numel():
        kernels.pack[(triton.cdiv(packed.numel(), _BLOCK),)](
            ids, packed, packed.numel(),
            NUM_IDS=layout.num_ids, WIDTH=layout.row_bytes, BITS=layout.bits,
            SPAN=(8 + layout.bits - 2) // layout.bits + 1, BLOCK=_BLOCK,
        )  # fmt: skip
    return packed


def unpack(packed: Tensor, layout: RowLayout, dtype: torch.dtype) -> Tensor:
    shape = (packed.shape[0], layout.num_layers, layout.top_k)
    return _unpack(packed, 0, packed.new_empty(shape, dtype=dtype), layout)


def layer_ids(packed: Tensor, layer: int, layout: RowLayout) -> Tensor:
    ids = packed.new_empty(packed.shape[0], layout.top_k, dtype=torch.int64)
    return _unpack(packed, layer * layout.top_k * layout.bits, ids, layout)


def _unpack(packed: Tensor, first_bit: int, ids: Tensor, layout: RowLayout) -> Tensor:
    """Fills ids `[T, ...]` from a bit of each row on."""
    if ids.numel():
        kernels.unpack[(triton.cdiv(ids.numel(), _BLOCK),)](
            packed.contiguous(), ids, ids.numel(), first_bit,
            NUM_IDS=ids[0].numel(), WIDTH=layout.row_bytes, BITS=layout.bits, BLOCK=_BLOCK,
        )  # fmt: skip
    return ids


def routing_map(
    packed: Tensor, layer: int, layout: RowLayout, scores: Tensor
) -> tuple[Tensor, Tensor]:
    packed = packed.contiguous()
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    T, E = scores.shape
    chosen = scores.new_empty(T, E, dtype=torch.bool)
    gathered = scores.new_empty(T, E)
    block_e = triton.next_power_of_2(E)
    block_t = max(1, _MAP_ELEMENTS // block_e)
    if T:
        kernels.routing_map[(triton.cdiv(T, block_t),)](
            packed, scores, chosen.view(torch.uint8), gathered, T, E, layer * layout.top_k,
            scores.stride(0),
            TOP_K=layout.top_k, WIDTH=layout.row_bytes, BITS=layout.bits,
            BLOCK_T=block_t, BLOCK_E=block_e,
        )  # fmt: skip
    return chosen, gathered
