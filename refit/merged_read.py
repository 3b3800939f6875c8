"""What vLLM's linears hold, read back, beside what they should hold.

A CPU engine keeps linears in packed forms that cannot be looked at, so each is read by its use:
what it gives for a row of the identity is a column of its weight, to the bit, since all other
products are 0. MLA's attention holds the two halves of kv_b_proj once more, for its own products.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lora_moe_rl.errors import RefitError

LinearBase = MLAAttention = Any  # vLLM's; of them is used:
LAYER = ("output_partition_sizes", "input_size", "tp_rank", "tp_size", "quant_method", "bias")
ATTENTION = ("W_UK_T", "W_UV", "num_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
ROWS = 512  # of the identity at once


def share(whole: Tensor, dim: int, size: int, rank: int, ranks: int) -> Tensor:
    """The part of `whole` that worker `rank` of `ranks` holds, `size` along `dim`. With fewer parts
    than workers, neighbours hold the same one: key and value heads. Raises RefitError when parts of
    this size do not make up the whole."""
    shares, left = divmod(whole.shape[dim], size)
    if left or not shares or ranks % shares:
        raise RefitError(
            f"{ranks} workers cannot hold {tuple(whole.shape)} in parts of {size} along {dim}"
        )
    return whole.narrow(dim, rank // (ranks // shares) * size, size)


def local_weight(layer: LinearBase, weights: Sequence[Tensor]) -> Tensor:
    """`[out, in]`, this worker's part of the whole `weights` that the layer fuses, in its order."""
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    pairs = zip(weights, layer.output_partition_sizes, strict=True)
    place = layer.tp_rank, layer.tp_size
    rows = torch.cat([share(weight, 0, size, *place) for weight, size in pairs])
    return share(rows, 1, width, *place)


def local_bias(layer: LinearBase, biases: Sequence[Tensor]) -> Tensor:
    """`[out]`"""
    pairs = zip(biases, layer.output_partition_sizes, strict=True)
    return torch.cat([share(b, 0, size, layer.tp_rank, layer.tp_size) for b, size in pairs])


@torch.no_grad()
def computes(layer: LinearBase, weight: Tensor) -> bool:
    """Whether the layer computes with this local weight `[out, in]`, in the layer's dtype and on
    its device, to the bit."""
    width = weight.shape[1]
    for start, stop in pairwise([*range(0, width, ROWS), width]):
        rows = torch.zeros(stop - start, width, dtype=weight.dtype, device=weight.device)
        rows[:, start:stop].fill_diagonal_(1)
        columns = layer.quant_method.apply(layer, rows).T
        if columns.shape != weight[:, start:stop].shape:
            return False
        if not torch.equal(columns, weight[:, start:stop]):
            return False
    return True


def adds(layer: LinearBase, biases: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether the layer holds these whole biases; none, if there are none. A CPU engine may hold
    what was in `dtype` in float32."""
    if not biases or layer.bias is None:
        return not biases and layer.bias is None
    wanted = local_bias(layer, biases).to(dtype)
    return torch.equal(layer.bias.cpu().float(), wanted.cpu().float())


def absorbs(attention: MLAAttention, weight: Tensor) -> bool:
    """Whether MLA's attention holds the two halves of this local weight of kv_b_proj."""
    heads, nope, v = attention.num_heads, attention.qk_nope_head_dim, attention.v_head_dim
    of_head = weight.view(heads, nope + v, attention.kv_lora_rank)
    keys, values = of_head.split([nope, v], dim=1)
    return torch.equal(attention.W_UK_T, keys) and torch.equal(
        attention.W_UV, values.transpose(1, 2)
    )
