"""The Triton kernels of the route codec. Rows as in `layout.py`."""

import triton
import triton.language as tl


@triton.jit
def pack(
    ids, packed, num_bytes,
    NUM_IDS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ids integer `[T, NUM_IDS]` -> packed uint8 `[T, WIDTH]`, one byte an element; SPAN: the most
    ids that share a byte. Grid: blocks of num_bytes = T * WIDTH."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = index // WIDTH
    bit = (index % WIDTH).to(tl.int32) * 8
    first = bit // BITS
    byte = tl.zeros((BLOCK,), dtype=tl.int32)
    for s in tl.static_range(SPAN):
        i = first + s
        shift = i * BITS - bit
        mask = (index < num_bytes) & (i < NUM_IDS) & (shift < 8)
        value = tl.load(ids + row * NUM_IDS + i, mask=mask, other=0).to(tl.int32)
        value = value & ((1 << BITS) - 1)
        byte |= (value << tl.minimum(tl.maximum(shift, 0), 8)) >> tl.maximum(-shift, 0)
    tl.store(packed + index, (byte & 255).to(tl.uint8), mask=index < num_bytes)


@triton.jit
def _id_at(row_ptr, bit, mask, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """The id that begins at `bit` of a row."""
    byte = bit // 8
    value = tl.load(row_ptr + byte, mask=mask, other=0).to(tl.int32)
    more = mask & (byte + 1 < WIDTH)
    value |= tl.load(row_ptr + byte + 1, mask=more, other=0).to(tl.int32) << 8
    if BITS > 9:  # it can touch a third byte
        more = mask & (byte + 2 < WIDTH)
        value |= tl.load(row_ptr + byte + 2, mask=more, other=0).to(tl.int32) << 16
    return (value >> (bit % 8)) & ((1 << BITS) - 1)


@triton.jit
def unpack(
    packed, ids, num_ids, first_bit,
    NUM_IDS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """packed uint8 `[T, WIDTH]` -> ids `[T, NUM_IDS]`, those from first_bit of each row on. Grid:
    blocks of num_ids = T * NUM_IDS."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_ids
    bit = first_bit + (index % NUM_IDS).to(tl.int32) * BITS
    value = _id_at(packed + (index // NUM_IDS) * WIDTH, bit, mask, WIDTH, BITS)
    tl.store(ids + index, value.to(ids.dtype.element_ty), mask=mask)


@triton.jit
def routing_map(
    packed, scores, chosen, gathered, T, E, first_id, stride_st,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """scores `[T, E]`, its last stride 1 -> chosen uint8 and gathered `[T, E]`; first_id: of the
    layer in a row. Grid: blocks of T; BLOCK_E >= E."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    t_mask = t < T
    t = t.to(tl.int64)
    hit = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        bit = tl.zeros((BLOCK_T,), dtype=tl.int32) + (first_id + k) * BITS
        value = _id_at(packed + t * WIDTH, bit, t_mask, WIDTH, BITS)
        hit |= (value[:, None] == e).to(tl.int32)
    mask = t_mask[:, None] & (e < E)
    score = tl.load(scores + t[:, None] * stride_st + e, mask=mask, other=0.0)
    tl.store(chosen + t[:, None] * E + e, hit.to(tl.uint8), mask=mask)
    tl.store(gathered + t[:, None] * E + e, tl.where(hit > 0, score, 0.0), mask=mask)
