"""Packed rows, as in `layout.py`, unpacked one layer at a time on the device that asks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lora_moe_rl.kernels import backend
from lora_moe_rl.kernels.route_codec import arrays, cpu_path
from lora_moe_rl.kernels.route_codec.layout import RowLayout


def layer_ids(packed: Tensor, layer: int, layout: RowLayout, kernel: str = "auto") -> Tensor:
    """The ids of one of the rows' MoE layers, as a router takes them: uint8 `[T, row_bytes]` ->
    int64 `[T, top_k]`. Nothing else of the rows is unpacked.

    Raises ValueError for rows of another width and a layer that they do not have.
    """
    arrays.check_rows(packed.shape, layout)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not one of the {layout.num_layers} of a row")
    if backend.resolve(kernel, packed.device) == "torch":
        if packed.device.type == "cpu":
            return cpu_path.layer_ids(packed.numpy(), layer, layout)
        return _without_triton(packed, layer, layout)
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
    """How many of the T tokens each expert has, by packed rows of the host, uint8 `[T, row_bytes]`:
    int64 `[layers, experts]` on the device. The ids of one layer are there at a time."""
    ids_of = by_layer(rows, layout, device)
    counts = torch.zeros(layout.num_layers, layout.num_experts, dtype=torch.int64, device=device)
    for layer, of_layer in enumerate(counts):
        ids = ids_of(layer).flatten()
        of_layer.scatter_add_(0, ids, torch.ones_like(ids))
    return counts


def _without_triton(packed: Tensor, layer: int, layout: RowLayout) -> Tensor:
    """`layer_ids` on a device."""
    bits = layout.bits
    bit = (layer * layout.top_k + torch.arange(layout.top_k, device=packed.device)) * bits
    byte, last = bit // 8, layout.row_bytes - 1
    value = torch.zeros(packed.shape[0], layout.top_k, dtype=torch.int64, device=packed.device)
    for i in range(3):  # 7 bits before it and up to 15 of its own
        # Beyond the row the last byte is read again, into bits that are cut off.
        value |= packed[:, (byte + i).clamp(max=last)].to(torch.int64) << 8 * i
    return (value >> bit % 8) & ((1 << bits) - 1)
