"""The Triton kernels of the merges: each program reads a tile of W once and writes it once.

W `[E, out, in]` and what belongs to it are contiguous; A `[E, r, in]` and B `[E, out, r]` have any
strides. Sums are float32.
"""

import triton
import triton.language as tl

FP8_BLOCK = tl.constexpr(128)
FP8_MAX = tl.constexpr(448.0)
GROUP = tl.constexpr(32)
HALF_RANGE = tl.constexpr(7.5)
# v + _ROUND - _ROUND is v rounded to an integer, ties to even, for |v| < 2^22.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _delta(
    A, B, e, o, i, R, out_features, in_features,
    stride_ae, stride_ar, stride_ai, stride_be, stride_bo, stride_br,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """B A of expert e at the rows o and columns i. PRECISION: of float32 operands."""
    A += e.to(tl.int64) * stride_ae
    B += e.to(tl.int64) * stride_be
    acc = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for r0 in range(0, R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        b_ptrs = B + o[:, None] * stride_bo + r[None, :] * stride_br
        b = tl.load(b_ptrs, mask=(o < out_features)[:, None] & (r < R)[None, :], other=0.0)
        a_ptrs = A + r[:, None] * stride_ar + i[None, :] * stride_ai
        a = tl.load(a_ptrs, mask=(r < R)[:, None] & (i < in_features)[None, :], other=0.0)
        if UPCAST:  # the interpreter multiplies the bits of bfloat16
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(b, a, acc, input_precision=PRECISION)
    return acc


@triton.jit
def merge_delta(
    out, W, A, B, scale, R, out_features, in_features,
    stride_ae, stride_ar, stride_ai, stride_be, stride_bo, stride_br,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out = W + scale * B A. Grid: (blocks of out and in, E)."""
    blocks_i = tl.cdiv(in_features, BLOCK_I)
    e = tl.program_id(1)
    o = (tl.program_id(0) // blocks_i) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (tl.program_id(0) % blocks_i) * BLOCK_I + tl.arange(0, BLOCK_I)
    delta = _delta(
        A, B, e, o, i, R, out_features, in_features,
        stride_ae, stride_ar, stride_ai, stride_be, stride_bo, stride_br,
        UPCAST, PRECISION, BLOCK_O, BLOCK_I, BLOCK_R,
    )  # fmt: skip
    mask = (o < out_features)[:, None] & (i < in_features)[None, :]
    offsets = (e.to(tl.int64) * out_features + o)[:, None] * in_features + i[None, :]
    value = tl.load(W + offsets, mask=mask, other=0.0).to(tl.float32) + scale * delta
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _to_e4m3(value):
    """value, |value| <= 448, rounded to what float8_e4m3fn holds, ties to even."""
    exponent = (value.to(tl.int32, bitcast=True) >> 23) & 255
    step = tl.maximum(exponent - 3, 127 - 9)  # three bits of mantissa; subnormal below 2^-6
    steps = value * ((254 - step) << 23).to(tl.float32, bitcast=True)
    return ((steps + _ROUND) - _ROUND) * (step << 23).to(tl.float32, bitcast=True)


@triton.jit
def merge_delta_fp8(
    W, scale_inv, A, B, scale, R, out_features, in_features,
    stride_ae, stride_ar, stride_ai, stride_be, stride_bo, stride_br,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """W float8_e4m3fn, scale_inv float32 `[E, blocks of out, blocks of in]`, both in place.
    Grid: (blocks of out and in, E)."""
    blocks_i = tl.cdiv(in_features, FP8_BLOCK)
    blocks_o = tl.cdiv(out_features, FP8_BLOCK)
    e = tl.program_id(1)
    o = (tl.program_id(0) // blocks_i) * FP8_BLOCK + tl.arange(0, FP8_BLOCK)
    i = (tl.program_id(0) % blocks_i) * FP8_BLOCK + tl.arange(0, FP8_BLOCK)
    delta = _delta(
        A, B, e, o, i, R, out_features, in_features,
        stride_ae, stride_ar, stride_ai, stride_be, stride_bo, stride_br,
        UPCAST, PRECISION, FP8_BLOCK, FP8_BLOCK, BLOCK_R,
    )  # fmt: skip
    mask = (o < out_features)[:, None] & (i < in_features)[None, :]
    offsets = (e.to(tl.int64) * out_features + o)[:, None] * in_features + i[None, :]
    scale_ptr = scale_inv + e * blocks_o * blocks_i + tl.program_id(0)
    value = tl.load(W + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    value += scale * delta
    largest = tl.max(tl.max(tl.abs(value), axis=1), axis=0)
    new_scale = tl.where(largest > 0, tl.div_rn(largest, FP8_MAX), 1.0)
    scaled = tl.div_rn(value, tl.broadcast_to(new_scale, (FP8_BLOCK, FP8_BLOCK)))
    scaled = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    tl.store(W + offsets, _to_e4m3(scaled).to(W.dtype.element_ty), mask=mask)
    tl.store(scale_ptr, new_scale)


@triton.jit
def merge_delta_int4(
    packed, scales, A, B, scale, R, out_features, in_features,
    stride_ae, stride_ar, stride_ai, stride_be, stride_bo, stride_br,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """packed int32 `[E, out, in / 8]`, scales `[E, out, in / 32]`, both in place; BLOCK_I is a
    multiple of 32. Grid: (blocks of out and in, E)."""
    blocks_i = tl.cdiv(in_features, BLOCK_I)
    e = tl.program_id(1)
    o = (tl.program_id(0) // blocks_i) * BLOCK_O + tl.arange(0, BLOCK_O)
    i0 = (tl.program_id(0) % blocks_i) * BLOCK_I
    i = i0 + tl.arange(0, BLOCK_I)
    delta = _delta(
        A, B, e, o, i, R, out_features, in_features,
        stride_ae, stride_ar, stride_ai, stride_be, stride_bo, stride_br,
        UPCAST, PRECISION, BLOCK_O, BLOCK_I, BLOCK_R,
    )  # fmt: skip
    row = (e.to(tl.int64) * out_features + o)[:, None]
    o_mask = (o < out_features)[:, None]
    mask = o_mask & (i < in_features)[None, :]
    word = tl.load(packed + row * (in_features // 8) + i[None, :] // 8, mask=mask, other=0)
    step = ((word >> (4 * (i % 8))[None, :]) & 15) - 8
    groups = in_features // GROUP
    old = tl.load(scales + row * groups + i[None, :] // GROUP, mask=mask, other=0.0)
    value = step.to(tl.float32) * old.to(tl.float32) + scale * delta

    value = tl.reshape(value, (BLOCK_O, BLOCK_I // GROUP, GROUP))
    largest = tl.max(tl.abs(value), axis=2)
    new = (largest / HALF_RANGE).to(scales.dtype.element_ty)
    new = tl.where(new.to(tl.float32) > 0, new.to(tl.float32), 1.0)
    group = i0 // GROUP + tl.arange(0, BLOCK_I // GROUP)[None, :]
    new_ptrs = scales + row * groups + group
    tl.store(new_ptrs, new.to(scales.dtype.element_ty), mask=o_mask & (group < groups))

    divisor = tl.broadcast_to(new[:, :, None], (BLOCK_O, BLOCK_I // GROUP, GROUP))
    steps = (tl.div_rn(value, divisor) + _ROUND) - _ROUND
    steps = tl.minimum(tl.maximum(steps, -8.0), 7.0).to(tl.int32) + 8
    steps = tl.reshape(steps, (BLOCK_O, BLOCK_I // 8, 8))
    words = tl.sum(steps << (4 * tl.arange(0, 8))[None, None, :], axis=2)
    index = i0 // 8 + tl.arange(0, BLOCK_I // 8)[None, :]
    word_mask = o_mask & (index < in_features // 8)
    tl.store(packed + row * (in_features // 8) + index, words, mask=word_mask)
