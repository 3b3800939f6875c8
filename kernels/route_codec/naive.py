"""The readable reference: one bit after the other."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.kernels.route_codec.layout import RowLayout


def pack(ids: np.ndarray, layout: RowLayout) -> np.ndarray:
    """ids `[T, layers, top_k]` -> uint8 `[T, row_bytes]`."""
    packed = np.zeros((len(ids), layout.row_bytes), dtype=np.uint8)
    for t, row in enumerate(ids.reshape(len(ids), layout.num_ids)):
        for i, value in enumerate(row.tolist()):
            for bit in range(layout.bits):
                position = i * layout.bits + bit
                packed[t, position // 8] |= ((value >> bit) & 1) << position % 8
    return packed


def unpack(packed: np.ndarray, layout: RowLayout) -> np.ndarray:
    """uint8 `[T, row_bytes]` -> int64 `[T, layers, top_k]`."""
    ids = np.zeros((len(packed), layout.num_ids), dtype=np.int64)
    for t, row in enumerate(packed.tolist()):
        whole = int.from_bytes(row, "little")
        for i in range(layout.num_ids):
            ids[t, i] = (whole >> i * layout.bits) & ((1 << layout.bits) - 1)
    return ids.reshape(len(packed), layout.num_layers, layout.top_k)
