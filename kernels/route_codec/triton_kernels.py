"""The Triton kernel of the route codec. Rows as in `layout.py`."""

import triton
import triton.language as tl


@triton.jit
def layer_ids(
    packed, ids, num_ids, first_bit,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """packed uint8 `[T, WIDTH]` -> ids `[T, TOP_K]`, those of the layer whose first id begins at
    first_bit of each row. Grid: blocks of num_ids = T * TOP_K."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_ids
    bit = first_bit + (index % TOP_K).to(tl.int32) * BITS
    byte = bit // 8
    row = packed + (index // TOP_K) * WIDTH
    value = tl.load(row + byte, mask=mask, other=0).to(tl.int32)
    more = mask & (byte + 1 < WIDTH)
    value |= tl.load(row + byte + 1, mask=more, other=0).to(tl.int32) << 8
    if BITS > 9:  # an id can touch a third byte
        more = mask & (byte + 2 < WIDTH)
        value |= tl.load(row + byte + 2, mask=more, other=0).to(tl.int32) << 16
    value = (value >> (bit % 8)) & ((1 << BITS) - 1)
    tl.store(ids + index, value.to(ids.dtype.element_ty), mask=mask)
