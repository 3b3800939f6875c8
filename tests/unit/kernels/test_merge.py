"""Merges against their float64 references, and the quantised formats against compressed-tensors."""

import importlib

import pytest
import torch
from kernel_cases import DEVICE, INTERPRETER, KERNEL

from lora_moe_rl.kernels import merge
from lora_moe_rl.kernels.merge import formats, naive

SHAPES = {
    "experts": ((3, 70, 96), (3, 5, 96), (3, 70, 5)),
    "dense, odd": ((37, 41), (17, 41), (37, 17)),
    "shared A": ((2, 33, 64), (3, 64), (2, 33, 3)),
    "shared B": ((2, 33, 64), (2, 40, 64), (33, 40)),
    "rank 1": ((1, 130), (1, 130), (1, 1)),
}
# Blocks that are not whole: 200 = 128 + 72.
QUANTISED = {
    "experts": ((2, 150, 160), (2, 3, 160), (2, 150, 3)),
    "dense": ((40, 288), (17, 288), (40, 17)),
}
# The interpreter cuts bfloat16 off where a GPU rounds it.
ULPS = 2 if INTERPRETER else 1


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def operands(shapes, dtype=torch.float32):
    W, A, B = shapes
    return draw(*W), draw(*A, dtype=dtype, seed=1), draw(*B, dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", SHAPES)
def test_one_rounding(shapes, dtype):
    W, A, B = operands(SHAPES[shapes])
    W = W.to(dtype)
    exact = naive.merged(W, A, B, 0.7)
    before = W.clone()
    out = torch.full_like(W, float("nan"))
    assert merge.merge_delta_(W, A, B, 0.7, out=out, kernel=KERNEL) is out
    assert torch.equal(W, before)
    assert merge.merge_delta_(W, A, B, 0.7, kernel=KERNEL) is W
    assert torch.equal(W, out)
    # Half a step of the dtype, and the float32 sum's own error.
    step = torch.finfo(dtype).eps * exact.abs() * 0.5 * ULPS
    allowed = step * 1.001 + 2e-6 * (1 + (A.shape[-2]) ** 0.5)
    assert ((W.double() - exact).abs() <= allowed).all()


def test_bfloat16_adapters():
    W, A, B = operands(SHAPES["experts"], torch.bfloat16)
    expected = naive.merge_delta(W, A, B, 2.0)
    merge.merge_delta_(W, A, B, 2.0, kernel=KERNEL)
    torch.testing.assert_close(W, expected)


def steps_of_e4m3(value):
    """The distance between neighbours of float8_e4m3fn at `value`."""
    exponent = torch.floor(torch.log2(value.abs().clamp(min=2.0**-6)))
    return torch.exp2(exponent - 3)


@pytest.mark.parametrize("shapes", QUANTISED)
def test_fp8(shapes):
    value, A, B = operands(QUANTISED[shapes])
    W, scale_inv = formats.quantise_fp8(value)
    exact = naive.merged(formats.dequantise_fp8(W, scale_inv, torch.float64), A, B, 0.3)
    naive_W, naive_scale = naive.merge_delta_fp8(W, scale_inv, A, B, 0.3)
    merge.merge_delta_fp8_(W, scale_inv, A, B, 0.3, kernel=KERNEL)
    torch.testing.assert_close(scale_inv, naive_scale, rtol=1e-5, atol=0)
    spread = formats._spread_blocks(scale_inv, W.shape).double()
    error = (formats.dequantise_fp8(W, scale_inv, torch.float64) - exact).abs()
    assert (error <= 0.501 * spread * steps_of_e4m3(exact / spread)).all()
    assert (W.float() != naive_W.float()).float().mean() < 0.01  # ties that fell the other way


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", QUANTISED)
def test_int4(shapes, scale_dtype):
    value, A, B = operands(QUANTISED[shapes])
    packed, scales = formats.quantise_int4(value, scale_dtype)
    exact = naive.merged(formats.dequantise_int4(packed, scales, torch.float64), A, B, 0.3)
    naive_packed, naive_scales = naive.merge_delta_int4(packed, scales, A, B, 0.3)
    merge.merge_delta_int4_(packed, scales, A, B, 0.3, kernel=KERNEL)
    eps = torch.finfo(scale_dtype).eps
    torch.testing.assert_close(scales, naive_scales, rtol=ULPS * eps, atol=0)
    error = (formats.dequantise_int4(packed, scales, torch.float64) - exact).abs()
    spread = scales.double().repeat_interleave(32, dim=-1)
    # Where the scale was rounded down, the largest of a group lies more than half a step out.
    assert (error <= (0.501 + 8 * ULPS * eps) * spread).all()
    if not INTERPRETER:
        assert (packed != naive_packed).float().mean() < 0.01


def test_a_zero_weight_stays_zero():
    zeros = torch.zeros(128, 160)
    A, B = torch.zeros(3, 160), torch.zeros(128, 3)
    W, scale_inv = formats.quantise_fp8(zeros)
    merge.merge_delta_fp8_(W, scale_inv, A, B, 1.0, kernel=KERNEL)
    assert torch.equal(formats.dequantise_fp8(W, scale_inv), zeros)
    packed, scales = formats.quantise_int4(zeros, torch.bfloat16)
    merge.merge_delta_int4_(packed, scales, A, B, 1.0, kernel=KERNEL)
    assert torch.equal(formats.dequantise_int4(packed, scales), zeros)


@pytest.mark.skipif(INTERPRETER, reason="of the library and the formats alone")
def test_int4_is_the_format_of_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(-8, 8, (5, 64), dtype=torch.int8)
    packed = helpers.pack_to_int32(values, 4)
    ones = torch.ones(5, 2)
    assert torch.equal(formats.dequantise_int4(packed, ones), values.float())
    value = draw(5, 64)
    ours, scales = formats.quantise_int4(value, torch.float32)
    theirs = helpers.unpack_from_int32(ours, 4, torch.Size((5, 64)))
    dequantised = theirs.float() * scales.repeat_interleave(32, dim=-1)
    assert torch.equal(formats.dequantise_int4(ours, scales), dequantised)


@pytest.mark.skipif(INTERPRETER, reason="of the library and the formats alone")
def test_int4_scales_are_those_of_compressed_tensors():
    args = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=32
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    value = draw(5, 2, 32)
    theirs, _ = calculate_qparams(value.amin(-1), value.amax(-1), args)
    _, ours = formats.quantise_int4(value.flatten(-2), torch.float32)
    torch.testing.assert_close(ours, theirs)


def _mutated(path, change):
    """`path`'s merges, broken: the adapter's scale dropped, an expert's adapter given to the next,
    or the last row of a weight left out."""
    right = path.merge_delta

    def merge_delta(out, W, A, B, scale):
        if change == "no scale":
            right(out, W, A, B, 1.0)
        elif change == "wrong expert":
            right(out, W, A, B.roll(1, 0), scale)
        else:
            keep = out[:, -1].clone()
            right(out, W, A, B, scale)
            out[:, -1] = keep

    return merge_delta


@pytest.mark.parametrize("change", ["no scale", "wrong expert", "last row skipped"])
def test_a_broken_merge_is_noticed(monkeypatch, change):
    path = importlib.import_module(f"lora_moe_rl.kernels.merge.{KERNEL}_path")
    monkeypatch.setattr(path, "merge_delta", _mutated(path, change))
    with pytest.raises(AssertionError):
        test_one_rounding("experts", torch.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda W, A, B: merge.merge_delta_(W, A[:, :, :90], B, 1.0), r"A has the shape"),
        (lambda W, A, B: merge.merge_delta_(W, A, B[:, :3], 1.0), r"B has the shape \(3, 3, 5\)"),
        (lambda W, A, B: merge.merge_delta_(W, A, B, 1.0, out=W.half()), "out is torch.float16"),
        (lambda W, A, B: merge.merge_delta_(W.mT, B.mT, A.mT, 1.0), "pass a contiguous one"),
        (lambda W, A, B: merge.merge_delta_fp8_(W, W, A, B, 1.0), r"it is float32 \(3, 1, 1\)"),
        (
            lambda W, A, B: merge.merge_delta_int4_(W[..., :11].int(), W, A, B, 1.0),
            "88 input features, which are not whole groups of 32",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(*operands(SHAPES["experts"]))


def test_meta_tensors():
    W, A, B = (t.to("meta") for t in operands(SHAPES["experts"]))
    assert merge.merge_delta_(W, A, B, 1.0).shape == W.shape
