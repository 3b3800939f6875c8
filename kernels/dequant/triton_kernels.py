"""The dequantisations as Triton kernels: a program reads a tile of packed values and its scales
once and writes the tile of the weight. Rows are whole and contiguous; experts may stand apart.
"""

import triton
import triton.language as tl

FP8_BLOCK = tl.constexpr(128)
INT4_GROUP = tl.constexpr(32)
MXFP4_GROUP = tl.constexpr(32)


@triton.jit
def int4(
    packed, scales, out, out_features, in_features, stride_pe, stride_se,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """packed int32 `[E, out, in / 8]`, scales `[E, out, in / 32]`, out `[E, out, in]`; BLOCK_I is a
    multiple of 32. Grid: (blocks of out and in, E)."""
    blocks_i = tl.cdiv(in_features, BLOCK_I)
    e = tl.program_id(1).to(tl.int64)
    o = (tl.program_id(0) // blocks_i) * BLOCK_O + tl.arange(0, BLOCK_O)[:, None]
    i0 = (tl.program_id(0) % blocks_i) * BLOCK_I
    w = i0 // 8 + tl.arange(0, BLOCK_I // 8)[None, :]
    mask = (o < out_features) & (w < in_features // 8)
    words = tl.load(packed + e * stride_pe + o * (in_features // 8) + w, mask=mask, other=0)
    steps = ((words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15) - 8
    steps = tl.reshape(steps, (BLOCK_O, BLOCK_I // INT4_GROUP, INT4_GROUP))

    g = i0 // INT4_GROUP + tl.arange(0, BLOCK_I // INT4_GROUP)[None, :]
    s_mask = (o < out_features) & (g < in_features // INT4_GROUP)
    s_ptrs = scales + e * stride_se + o * (in_features // INT4_GROUP) + g
    scale = tl.load(s_ptrs, mask=s_mask, other=0.0).to(out.dtype.element_ty)
    # Of bfloat16 exact in float32, so that one rounding is left.
    value = steps.to(tl.float32) * scale.to(tl.float32)[:, :, None]
    value = tl.reshape(value, (BLOCK_O, BLOCK_I))
    i = i0 + tl.arange(0, BLOCK_I)[None, :]
    out_mask = (o < out_features) & (i < in_features)
    out_ptrs = out + (e * out_features + o) * in_features + i
    tl.store(out_ptrs, value.to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def fp8(
    weight, scales, out, out_features, in_features, stride_pe, stride_se,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """weight float8_e4m3fn `[E, out, in]`, scales `[E, blocks of out, blocks of in]`; BLOCK_O and
    BLOCK_I divide 128. Grid: (blocks of out and in, E)."""
    blocks_i = tl.cdiv(in_features, BLOCK_I)
    e = tl.program_id(1).to(tl.int64)
    o0 = (tl.program_id(0) // blocks_i) * BLOCK_O
    i0 = (tl.program_id(0) % blocks_i) * BLOCK_I
    o = o0 + tl.arange(0, BLOCK_O)[:, None]
    i = i0 + tl.arange(0, BLOCK_I)[None, :]
    mask = (o < out_features) & (i < in_features)
    place = (o0 // FP8_BLOCK) * tl.cdiv(in_features, FP8_BLOCK) + i0 // FP8_BLOCK
    scale = tl.load(scales + e * stride_se + place).to(tl.float32)
    value = tl.load(weight + e * stride_pe + o * in_features + i, mask=mask, other=0.0)
    value = value.to(tl.float32) * scale
    out_ptrs = out + (e * out_features + o) * in_features + i
    tl.store(out_ptrs, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def mxfp4(
    blocks, scales, out, out_features, in_features, stride_pe, stride_se,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """blocks uint8 `[E, out, in / 2]`, scales uint8 `[E, out, in / 32]`, out `[E, out, in]`;
    BLOCK_I is a multiple of 32. Grid: (blocks of out and in, E)."""
    blocks_i = tl.cdiv(in_features, BLOCK_I)
    e = tl.program_id(1).to(tl.int64)
    o = (tl.program_id(0) // blocks_i) * BLOCK_O + tl.arange(0, BLOCK_O)[:, None]
    i0 = (tl.program_id(0) % blocks_i) * BLOCK_I
    b = i0 // 2 + tl.arange(0, BLOCK_I // 2)[None, :]
    mask = (o < out_features) & (b < in_features // 2)
    pairs = tl.load(blocks + e * stride_pe + o * (in_features // 2) + b, mask=mask, other=0)
    codes = (pairs.to(tl.int32)[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 15
    codes = tl.reshape(codes, (BLOCK_O, BLOCK_I // MXFP4_GROUP, MXFP4_GROUP))
    value = _e2m1(codes)

    g = i0 // MXFP4_GROUP + tl.arange(0, BLOCK_I // MXFP4_GROUP)[None, :]
    s_mask = (o < out_features) & (g < in_features // MXFP4_GROUP)
    s_ptrs = scales + e * stride_se + o * (in_features // MXFP4_GROUP) + g
    power = _power_of_two(tl.load(s_ptrs, mask=s_mask, other=127))
    value = tl.reshape(value * power[:, :, None], (BLOCK_O, BLOCK_I))
    i = i0 + tl.arange(0, BLOCK_I)[None, :]
    out_mask = (o < out_features) & (i < in_features)
    out_ptrs = out + (e * out_features + o) * in_features + i
    tl.store(out_ptrs, value.to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def int4_marlin(
    words, scales, out, out_features, in_features, stride_pe, stride_se,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """words int32 `[E, in / 16, out * 2]`, scales `[E, in / 32, out]`, out `[E, out, in]`; BLOCK_O
    is 64, BLOCK_I a multiple of 32. Grid: (blocks of out and in, E)."""
    e, o0, i0, codes = _of_tiles(words, stride_pe, out_features, in_features, BLOCK_O, BLOCK_I)
    o = o0 + tl.arange(0, BLOCK_O)[:, None]
    g = i0 // INT4_GROUP + tl.arange(0, BLOCK_I // INT4_GROUP)[None, :]
    place = o0 + (o % 8) * 8 + (o // 8) % 8
    s_ptrs = scales + e * stride_se + g * out_features + place
    scale = tl.load(s_ptrs, mask=g < in_features // INT4_GROUP, other=0.0)
    scale = scale.to(out.dtype.element_ty).to(tl.float32)
    value = tl.reshape(codes - 8, (BLOCK_O, BLOCK_I // INT4_GROUP, INT4_GROUP)).to(tl.float32)
    value = tl.reshape(value * scale[:, :, None], (BLOCK_O, BLOCK_I))
    i = i0 + tl.arange(0, BLOCK_I)[None, :]
    out_ptrs = out + (e * out_features + o) * in_features + i
    tl.store(out_ptrs, value.to(out.dtype.element_ty), mask=i < in_features)


@triton.jit
def mxfp4_marlin(
    words, scales, out, out_features, in_features, stride_pe, stride_se,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """As `int4_marlin`, with scales uint8."""
    e, o0, i0, codes = _of_tiles(words, stride_pe, out_features, in_features, BLOCK_O, BLOCK_I)
    o = o0 + tl.arange(0, BLOCK_O)[:, None]
    g = i0 // MXFP4_GROUP + tl.arange(0, BLOCK_I // MXFP4_GROUP)[None, :]
    place = o0 + (o % 8) * 8 + (o // 32) % 2 * 4 + (o // 8) % 2 * 2 + (o // 16) % 2
    s_ptrs = scales + e * stride_se + g * out_features + place
    power = _power_of_two(tl.load(s_ptrs, mask=g < in_features // MXFP4_GROUP, other=127))
    value = _e2m1(tl.reshape(codes, (BLOCK_O, BLOCK_I // MXFP4_GROUP, MXFP4_GROUP)))
    value = tl.reshape(value * power[:, :, None], (BLOCK_O, BLOCK_I))
    i = i0 + tl.arange(0, BLOCK_I)[None, :]
    out_ptrs = out + (e * out_features + o) * in_features + i
    tl.store(out_ptrs, value.to(out.dtype.element_ty), mask=i < in_features)


@triton.jit
def _of_tiles(
    words, stride_pe, out_features, in_features, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):
    """Which expert, outputs from where and inputs from where are this program's, and their codes
    int32 `[BLOCK_O, BLOCK_I]` of Marlin's tiles: each word is read once, in the order that it
    stands in."""
    blocks_i = tl.cdiv(in_features, BLOCK_I)
    e = tl.program_id(1).to(tl.int64)
    o0 = (tl.program_id(0) // blocks_i) * BLOCK_O
    i0 = (tl.program_id(0) % blocks_i) * BLOCK_I
    row = i0 // 16 + tl.arange(0, BLOCK_I // 16)[:, None]
    w_ptrs = words + e * stride_pe + row * (2 * out_features) + 2 * o0
    column = tl.arange(0, 2 * BLOCK_O)[None, :]
    found = tl.load(w_ptrs + column, mask=row < in_features // 16, other=0)
    codes = (found[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    # [tiles, o0-2, i1-2, o4-5, i0, o3, i3] to [o4-5, o3, o0-2, tiles, i3, i1-2, i0]
    codes = tl.reshape(codes, (BLOCK_I // 16, 8, 4, 4, 2, 2, 2))
    return e, o0, i0, tl.reshape(tl.permute(codes, (3, 5, 1, 0, 6, 2, 4)), (BLOCK_O, BLOCK_I))


@triton.jit
def _e2m1(codes):
    """The values of 4-bit codes, by arithmetic: below 1 it is half the mantissa bit, above (1 + m /
    2) * 2^(e - 1)."""
    size = codes & 7
    exponent, mantissa = size >> 1, (size & 1).to(tl.float32)
    large = (1.0 + 0.5 * mantissa) * (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
    value = tl.where(exponent > 0, large, 0.5 * mantissa)
    return tl.where(codes > 7, -value, value)


@triton.jit
def _power_of_two(biased):
    bits = biased.to(tl.int32)
    bits = tl.where(bits > 0, bits << 23, 1 << 22)  # of 2^-127, which has no exponent of its own
    return bits.to(tl.float32, bitcast=True)
