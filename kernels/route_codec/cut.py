"""Some layers of packed rows, without unpacking them."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.kernels.route_codec.arrays import check_rows
from lora_moe_rl.kernels.route_codec.layout import RowLayout


def cut_array(packed: np.ndarray, layout: RowLayout, first: int, count: int) -> np.ndarray:
    """uint8 `[T, row_bytes]` -> uint8 `[T, row_bytes of count layers]`: layers first to
    first + count - 1, laid out as rows of their own.

    Raises ValueError for rows of another width and layers that they do not have.
    """
    check_rows(packed.shape, layout)
    if not 0 <= first < first + count <= layout.num_layers:
        raise ValueError(
            f"layers {first} to {first + count - 1} are not among the {layout.num_layers} of a row"
        )
    if count == layout.num_layers:
        return packed
    part = RowLayout(count, layout.top_k, layout.num_experts)
    start, shift = divmod(first * layout.top_k * layout.bits, 8)
    cut = packed[:, start : start + part.row_bytes] >> shift
    if shift:
        following = packed[:, start + 1 : start + 1 + part.row_bytes]
        cut[:, : following.shape[1]] |= following << (8 - shift)
    spare = 8 * part.row_bytes - part.num_ids * part.bits
    cut[:, -1] &= 0xFF >> spare
    return cut
