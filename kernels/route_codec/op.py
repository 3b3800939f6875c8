"""The route codec on tensors. Rows as in `layout.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lora_moe_rl.kernels import backend
from lora_moe_rl.kernels.route_codec import arrays, cpu_path
from lora_moe_rl.kernels.route_codec.layout import RowLayout


def pack(ids: Tensor, layout: RowLayout, kernel: str = "auto") -> Tensor:
    """ids `[T, layers, top_k]` of any integer dtype -> uint8 `[T, row_bytes]`.

    Raises ValueError for another shape, and on the CPU for an id out of range; on a device, ids are
    not looked at, and only their low bits are kept.
    """
    if ids.dim() != 3 or ids.shape[1:] != (layout.num_layers, layout.top_k):
        raise ValueError(
            f"ids have the shape {tuple(ids.shape)}, not (tokens, {layout.num_layers}, "
            f"{layout.top_k})"
        )
    return _pack(ids, *_numbers(layout), backend.resolve(kernel, ids.device))


def unpack(packed: Tensor, layout: RowLayout, kernel: str = "auto") -> Tensor:
    """uint8 `[T, row_bytes]` -> uint8 (int16 above 256 experts) `[T, layers, top_k]`.

    Raises ValueError for rows of another width.
    """
    arrays.check_rows(packed.shape, layout)
    return _unpack(packed, *_numbers(layout), backend.resolve(kernel, packed.device))


def layer_ids(packed: Tensor, layer: int, layout: RowLayout, kernel: str = "auto") -> Tensor:
    """The ids of one of the rows' MoE layers, as a router takes them: uint8 `[T, row_bytes]` ->
    int64 `[T, top_k]`. Nothing else of the rows is unpacked.

    Raises ValueError for rows of another width and a layer that they do not have.
    """
    _check_layer(packed, layer, layout)
    if backend.resolve(kernel, packed.device) == "torch":
        return _layer_ids(packed, layer, layout)
    from lora_moe_rl.kernels.route_codec import triton_path

    return triton_path.layer_ids(packed, layer, layout)


def by_layer(rows: np.ndarray, layout: RowLayout, device: torch.device) -> Callable[[int], Tensor]:
    """Brings packed rows of the host, uint8 `[T, row_bytes]`, to a device; what is returned gives
    `layer_ids` of each of their layers. On the CPU they stay where they are, in Ray's memory
    perhaps, of which torch would warn that it cannot be written to."""
    if device.type == "cpu":
        return lambda layer: cpu_path.layer_ids(rows, layer, layout)
    writable = rows if rows.flags.writeable else rows.copy()
    packed = backend.on_device(torch.from_numpy(writable), device)
    return lambda layer: layer_ids(packed, layer, layout)


def expert_counts(rows: np.ndarray, layout: RowLayout, device: torch.device) -> Tensor:
    """Of packed rows of the host, uint8 `[T, row_bytes]`: int64 `[layers, experts]` on the device,
    how many of the T tokens each expert has. The ids of one layer are there at a time."""
    ids_of = by_layer(rows, layout, device)
    counts = torch.zeros(layout.num_layers, layout.num_experts, dtype=torch.int64, device=device)
    for layer, of_layer in enumerate(counts):
        ids = ids_of(layer).flatten()
        of_layer.scatter_add_(0, ids, torch.ones_like(ids))
    return counts


def routing_map(
    packed: Tensor, layer: int, layout: RowLayout, scores: Tensor, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """What Megatron's router gives its dispatcher, with the experts of packed rows: (routing map
    bool `[T, E]`, scores `[T, E]` with zeros for the experts that were not chosen).

    layer: which of the rows' MoE layers; scores `[T, E]`, any float dtype. Gradients flow to
    scores. Raises ValueError for shapes that do not fit.
    """
    _check_layer(packed, layer, layout)
    if scores.shape != (packed.shape[0], layout.num_experts):
        raise ValueError(
            f"scores have the shape {tuple(scores.shape)}; of {packed.shape[0]} rows and "
            f"{layout.num_experts} experts it is {(packed.shape[0], layout.num_experts)}"
        )
    chosen = backend.resolve(kernel, packed.device)
    return _RoutingMap.apply(scores, packed, layer, layout, chosen)


class _RoutingMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, packed, layer, layout, kernel):
        chosen, gathered = _routing_map(packed, scores, layer, *_numbers(layout), kernel)
        ctx.save_for_backward(chosen)
        ctx.mark_non_differentiable(chosen)
        return chosen, gathered

    @staticmethod
    def backward(ctx, *grads: Any):
        (chosen,) = ctx.saved_tensors
        return torch.where(chosen, grads[1], 0), None, None, None, None


def _check_layer(packed: Tensor, layer: int, layout: RowLayout) -> None:
    arrays.check_rows(packed.shape, layout)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not one of the {layout.num_layers} of a row")


def _numbers(layout: RowLayout) -> tuple[int, int, int]:
    return layout.num_layers, layout.top_k, layout.num_experts


def _ids_dtype(layout: RowLayout) -> torch.dtype:
    return torch.int16 if layout.wide else torch.uint8


def _pack_op(ids: Tensor, num_layers: int, top_k: int, num_experts: int, kernel: str) -> Tensor:
    layout = RowLayout(num_layers, top_k, num_experts)
    if kernel == "torch":
        return torch.from_numpy(arrays.pack_array(ids.cpu().numpy(), layout)).to(ids.device)
    from lora_moe_rl.kernels.route_codec import triton_path  # Triton is not on every machine

    return triton_path.pack(ids, layout)


def _unpack_op(
    packed: Tensor, num_layers: int, top_k: int, num_experts: int, kernel: str
) -> Tensor:
    layout = RowLayout(num_layers, top_k, num_experts)
    if kernel == "torch":
        ids = torch.from_numpy(arrays.unpack_array(packed.cpu().numpy(), layout))
        return ids.view(_ids_dtype(layout)).to(packed.device)
    from lora_moe_rl.kernels.route_codec import triton_path

    return triton_path.unpack(packed, layout, _ids_dtype(layout))


def _routing_map_op(
    packed: Tensor,
    scores: Tensor,
    layer: int,
    num_layers: int,
    top_k: int,
    num_experts: int,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    layout = RowLayout(num_layers, top_k, num_experts)
    if kernel == "torch":
        ids = _layer_ids(packed, layer, layout)
        chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        chosen.scatter_(1, ids, True)
        return chosen, torch.where(chosen, scores, 0)
    from lora_moe_rl.kernels.route_codec import triton_path

    return triton_path.routing_map(packed, layer, layout, scores)


def _layer_ids(packed: Tensor, layer: int, layout: RowLayout) -> Tensor:
    """int64 `[T, top_k]` of one layer, without Triton."""
    if packed.device.type == "cpu":
        return cpu_path.layer_ids(packed.numpy(), layer, layout)
    return _layer_ids_on_device(packed, layer, layout)


def _layer_ids_on_device(packed: Tensor, layer: int, layout: RowLayout) -> Tensor:
    bits = layout.bits
    bit = (layer * layout.top_k + torch.arange(layout.top_k, device=packed.device)) * bits
    byte, last = bit // 8, layout.row_bytes - 1
    value = torch.zeros(packed.shape[0], layout.top_k, dtype=torch.int64, device=packed.device)
    for i in range(3):  # 7 bits before it and up to 15 of its own
        # Beyond the row the last byte is read again, into bits that are cut off.
        value |= packed[:, (byte + i).clamp(max=last)].to(torch.int64) << 8 * i
    return (value >> bit % 8) & ((1 << bits) - 1)


# Opaque to torch.compile, with shapes for it and for meta tensors.
_pack = torch.library.custom_op("lora_moe_rl::pack_routes", _pack_op, mutates_args=())
_unpack = torch.library.custom_op("lora_moe_rl::unpack_routes", _unpack_op, mutates_args=())
_routing_map = torch.library.custom_op("lora_moe_rl::routing_map", _routing_map_op, mutates_args=())


@_pack.register_fake
def _(ids, num_layers, top_k, num_experts, kernel):
    width = RowLayout(num_layers, top_k, num_experts).row_bytes
    return ids.new_empty(ids.shape[0], width, dtype=torch.uint8)


@_unpack.register_fake
def _(packed, num_layers, top_k, num_experts, kernel):
    dtype = _ids_dtype(RowLayout(num_layers, top_k, num_experts))
    return packed.new_empty(packed.shape[0], num_layers, top_k, dtype=dtype)


@_routing_map.register_fake
def _(packed, scores, layer, num_layers, top_k, num_experts, kernel):
    return scores.new_empty(scores.shape, dtype=torch.bool), scores.new_empty(scores.shape)
