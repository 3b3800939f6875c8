"""The codec on numpy arrays, several ids in one 64-bit word at a time.

An id lies in a lane of 8 or 16 bits of a word, of which it needs `bits`. To pack, neighbouring
lanes are pushed together, and then pairs of those, until the ids of a word are dense; eight ids are
then `bits` whole bytes. To unpack, the same backwards. Rows are taken some at a time, so that a
step finds its operands in the cache, and numpy's own time for a call is small beside its work.
"""

from __future__ import annotations

import numpy as np

from lora_moe_rl.kernels.route_codec.layout import RowLayout

_IDS_AT_ONCE = 1 << 18
_GROUP = 8  # ids


def pack_array(ids: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Integer ids `[T, layers, top_k]` -> uint8 `[T, row_bytes]`, laid out as in `layout.py`.

    Raises ValueError for another shape, and for an id that is negative or too large.
    """
    if ids.ndim != 3 or ids.shape[1:] != (layout.num_layers, layout.top_k):
        raise ValueError(
            f"ids have the shape {ids.shape}, not (tokens, {layout.num_layers}, {layout.top_k})"
        )
    rows = np.ascontiguousarray(ids).reshape(len(ids), layout.num_ids)
    packed = np.empty((len(ids), layout.row_bytes), dtype=np.uint8)
    lane = _lane(layout)
    padded = -(-layout.num_ids // _GROUP) * _GROUP
    step = max(1, _IDS_AT_ONCE // padded)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        _check_range(part, layout)
        lanes = np.zeros((len(part), padded), lane) if padded > layout.num_ids else None
        if lanes is None:
            lanes = part.astype(lane)
        else:
            lanes[:, : layout.num_ids] = part
        dense = _pack_groups(lanes.reshape(-1), layout.bits).reshape(len(part), -1)
        packed[start : start + step] = dense[:, : layout.row_bytes]
    return packed


def unpack_array(packed: np.ndarray, layout: RowLayout) -> np.ndarray:
    """uint8 `[T, row_bytes]` -> uint8 (uint16 above 256 experts) `[T, layers, top_k]`.

    Raises ValueError for rows of another width.
    """
    check_rows(packed.shape, layout)
    lane = _lane(layout)
    ids = np.empty((len(packed), layout.num_ids), dtype=np.uint16 if layout.wide else np.uint8)
    padded = -(-layout.num_ids // _GROUP) * _GROUP
    width = padded * layout.bits // 8
    step = max(1, _IDS_AT_ONCE // padded)
    for start in range(0, len(packed), step):
        part = packed[start : start + step]
        if width > layout.row_bytes or not part.flags.c_contiguous:
            part = np.pad(part, ((0, 0), (0, width - layout.row_bytes)))
        lanes = _unpack_groups(part.reshape(-1), layout.bits, lane).reshape(len(part), padded)
        ids[start : start + step] = lanes[:, : layout.num_ids]
    return ids.reshape(len(packed), layout.num_layers, layout.top_k)


def check_rows(shape, layout: RowLayout) -> None:
    if len(shape) != 2 or shape[1] != layout.row_bytes:
        raise ValueError(
            f"packed rows have the shape {tuple(shape)}, not (tokens, {layout.row_bytes}) as of "
            f"{layout}"
        )


def _lane(layout: RowLayout) -> np.dtype:
    return np.dtype("<u1") if layout.bits <= 8 else np.dtype("<u2")


def _check_range(part: np.ndarray, layout: RowLayout) -> None:
    unsigned = part.view(f"u{part.itemsize}")  # a negative id is a large one
    if unsigned.max() >= layout.num_experts:
        bad = part[unsigned >= layout.num_experts][0]
        raise ValueError(f"expert id {bad} is not one of {layout.num_experts} experts")


def _pack_groups(lanes: np.ndarray, bits: int) -> np.ndarray:
    """Dense bytes of ids in their lanes; a multiple of 8 ids."""
    size = 8 * lanes.itemsize
    if bits == size:
        return lanes.view(np.uint8)
    words = lanes.view("<u8")
    spare = np.empty_like(words)
    field = bits
    while size < 64:
        np.right_shift(words, size - field, out=spare)
        spare &= _repeated(((1 << field) - 1) << field, 2 * size)
        words &= _repeated((1 << field) - 1, 2 * size)
        words |= spare
        size, field = 2 * size, 2 * field
    dense = np.empty(len(lanes) // _GROUP * bits, dtype=np.uint8)
    if lanes.itemsize == 1:  # a word is a group of 8 ids
        _move(dense, bits, 0, bits, words, out_of_words=True)
    else:  # two words are one
        low, high = words[0::2], words[1::2]
        _move(dense, bits, 0, 8, low | (high << field), out_of_words=True)
        _move(dense, bits, 8, bits - 8, high >> (64 - field), out_of_words=True)
    return dense


def _unpack_groups(dense: np.ndarray, bits: int, lane: np.dtype) -> np.ndarray:
    """The ids in lanes; the reverse of `_pack_groups`."""
    size = 8 * lane.itemsize
    if bits == size:
        return dense.view(lane)
    groups = len(dense) // bits
    words = np.zeros(groups * lane.itemsize, dtype="<u8")
    field = bits * (64 // size)
    if lane.itemsize == 1:
        _move(dense, bits, 0, bits, words, out_of_words=False)
    else:
        low, high = np.empty(groups, "<u8"), np.zeros(groups, "<u8")
        _move(dense, bits, 0, 8, low, out_of_words=False)
        _move(dense, bits, 8, bits - 8, high, out_of_words=False)
        words[0::2] = low & ((1 << field) - 1)
        words[1::2] = (low >> field) | (high << (64 - field))
    spare = np.empty_like(words)
    width = 64
    while width > size:
        width, field = width // 2, field // 2
        np.left_shift(words, width - field, out=spare)
        spare &= _repeated(((1 << field) - 1) << width, 2 * width)
        words &= _repeated((1 << field) - 1, 2 * width)
        words |= spare
    return words.view(lane)


def _repeated(mask: int, size: int) -> np.uint64:
    """mask in every `size` bits of a word."""
    return np.uint64(sum(mask << at for at in range(0, 64, size)))


def _move(dense, stride, start, count, words, out_of_words) -> None:
    """The low `count` bytes of each word to or from `dense[g * stride + start]`, in pieces of 8,
    4, 2 and 1 bytes."""
    at = 0
    for size in (8, 4, 2, 1):
        while count - at >= size:
            dtype = f"<u{size}"
            view = np.ndarray(len(words), dtype, dense.data, start + at, (stride,))
            piece = words.view(dtype)[at // size :: 8 // size]
            if out_of_words:
                view[...] = piece
            else:
                piece[...] = view
            at += size
