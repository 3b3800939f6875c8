"""The launch of the route codec's Triton kernel."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lora_moe_rl.kernels.route_codec import triton_kernels as kernels
from lora_moe_rl.kernels.route_codec.layout import RowLayout

_BLOCK = 1024


def layer_ids(packed: Tensor, layer: int, layout: RowLayout) -> Tensor:
    ids = packed.new_empty(packed.shape[0], layout.top_k, dtype=torch.int64)
    if ids.numel():
        kernels.layer_ids[(triton.cdiv(ids.numel(), _BLOCK),)](
            packed.contiguous(), ids, ids.numel(), layer * layout.top_k * layout.bits,
            TOP_K=layout.top_k, WIDTH=layout.row_bytes, BITS=layout.bits, BLOCK=_BLOCK,
        )  # fmt: skip
    return ids
