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
    # E2M1 by arithmetic: below 1 it is half the mantissa bit, above (1 + m / 2) * 2^(e - 1).
    size = codes & 7
    exponent, mantissa = size >> 1, (size & 1).to(tl.float32)
    large = (1.0 + 0.5 * mantissa) * (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
    value = tl.where(exponent > 0, large, 0.5 * mantissa)
    value = tl.where(codes > 7, -value, value)

    g = i0 // MXFP4_GROUP + tl.arange(0, BLOCK_I // MXFP4_GROUP)[None, :]
    s_mask = (o < out_features) & (g < in_features // MXFP4_GROUP)
    s_ptrs = scales + e * stride_se + o * (in_features // MXFP4_GROUP) + g
    bits = tl.load(s_ptrs, mask=s_mask, other=127).to(tl.int32)
    bits = tl.where(bits > 0, bits << 23, 1 << 22)  # of 2^-127, which has no exponent of its own
    power = bits.to(tl.float32, bitcast=True)
    value = tl.reshape(value * power[:, :, None], (BLOCK_O, BLOCK_I))
    i = i0 + tl.arange(0, BLOCK_I)[None, :]
    out_mask = (o < out_features) & (i < in_features)
    out_ptrs = out + (e * out_features + o) * in_features + i
    tl.store(out_ptrs, value.to(out.dtype.element_ty), mask=out_mask)
