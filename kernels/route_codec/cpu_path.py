"""One layer's ids of packed rows in the host's memory."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lora_moe_rl.kernels.route_codec.layout import RowLayout


def layer_ids(rows: np.ndarray, layer: int, layout: RowLayout) -> Tensor:
    """int64 `[T, top_k]`, from rows uint8 `[T, row_bytes]`: all ids out of one 64-bit word of each
    row, but for those that end beyond it, which come out of words of their own."""
    if layout.row_bytes < 8:
        rows = np.pad(rows, ((0, 0), (0, 8 - layout.row_bytes)))
    byte, shifts, later = _places(layer, layout)
    ids = torch.from_numpy(_words(rows, byte).copy()).unsqueeze(1) >> shifts
    for k, byte, shift in later:
        np.right_shift(_words(rows, byte), shift, out=ids.numpy()[:, k])
    return ids.bitwise_and_((1 << layout.bits) - 1)


@lru_cache
def _places(layer: int, layout: RowLayout) -> tuple[int, Tensor, list[tuple[int, int, int]]]:
    """(The byte where a word begins, the bit of the word where each id begins, and of each id that
    ends beyond the word its number, and where in which word of its own it begins.)"""
    begins = [(layer * layout.top_k + k) * layout.bits for k in range(layout.top_k)]
    last = max(0, layout.row_bytes - 8)
    byte, *own = (min(bit // 8, last) for bit in begins)
    later = [
        (k, at, bit - 8 * at)
        for k, (at, bit) in enumerate(zip(own, begins[1:], strict=True), start=1)
        if bit + layout.bits > 8 * byte + 64
    ]
    return byte, torch.tensor(begins).sub_(8 * byte).clamp_(max=63), later


def _words(rows: np.ndarray, byte: int) -> np.ndarray:
    """int64 `[T]`, a view of eight bytes of each row."""
    return rows[:, byte : byte + 8].view("<i8")[:, 0]
