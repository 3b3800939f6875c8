"""Dequantised weights, bit for bit: against compressed-tensors' and transformers' own, and against
the readable reference."""

import importlib
import importlib.util

import pytest
import torch
from kernel_cases import INTERPRETER, KERNEL, break_dequantisation
from packed_cases import draw

from lora_moe_rl.kernels.dequant import FORMS, Packed, dequantise, dequantise_, naive
from lora_moe_rl.kernels.dequant.formats import bad_scales, packed_shapes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Blocks and tiles that are not whole: 200 = 128 + 72.
SHAPES = {"experts": (3, 40, 96), "one": (1, 150, 288), "dense": (200, 160)}


def reference(packed, dtype):
    make = getattr(naive, packed.form)
    if len(packed.shape) == 2:
        return make(packed.data, packed.scales, dtype)
    pairs = zip(packed.data, packed.scales, strict=True)
    return torch.stack([make(data, scales, dtype) for data, scales in pairs])


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_reference(form, dtype):
    if INTERPRETER and dtype != torch.float32:
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds it")
    if form == "mxfp4" and dtype == torch.float16:
        pytest.skip("float16 has not the exponents of MXFP4")
    packed = draw(form, (2, 33, 64))
    out = torch.full(packed.shape, float("nan"), dtype=dtype)
    assert dequantise_(packed, out, KERNEL) is out
    assert same_bits(out, reference(packed, dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_both_paths(form, shape):
    packed = draw(form, SHAPES[shape])
    torch_path = dequantise(packed, torch.float32, "torch")
    assert same_bits(dequantise(packed, torch.float32, KERNEL), torch_path)
    assert torch_path.shape == SHAPES[shape] and torch_path.abs().max() > 0


@pytest.mark.parametrize("form", FORMS)
def test_experts_may_stand_apart(form):
    """As those of one rank in a stack of all, with gate and up in one."""
    whole = draw(form, (6, 128, 64))
    part = whole.of(slice(1, 6, 2))
    got = dequantise(part, torch.float32, KERNEL)
    assert torch.equal(got, dequantise(whole, torch.float32, KERNEL)[1::2])


@pytest.mark.skipif(INTERPRETER, reason="of the library and torch's path alone")
class TestOthers:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_int4_is_compressed_tensors(self, dtype):
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors.pack_quantized.helpers import (
            pack_to_int32,
            unpack_from_int32,
        )
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        q = torch.randint(-8, 8, (70, 96), dtype=torch.int8)
        scales = (torch.rand(70, 3) * 0.02 + 1e-3).bfloat16().to(dtype)
        packed = Packed("int4", pack_to_int32(q, 4), scales)
        assert torch.equal(unpack_from_int32(packed.data, 4, q.shape), q)
        assert same_bits(dequantise(packed, dtype), dequantize(q, scales, dtype=dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_fp8_is_transformers(self, dtype):
        fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
        packed = draw("fp8", (2, 256, 384))
        theirs = fp8.Fp8Dequantize(None)._dequantize_one(packed.data, packed.scales, dtype)
        assert same_bits(dequantise(packed, dtype), theirs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_mxfp4_is_transformers(self, dtype):
        mxfp4 = importlib.import_module("transformers.integrations.mxfp4")
        packed = draw("mxfp4", (2, 40, 96))
        theirs = mxfp4.convert_moe_packed_tensors(packed.data, packed.scales, dtype=dtype)
        assert same_bits(dequantise(packed, dtype), theirs.transpose(1, 2).contiguous())


@pytest.mark.skipif(INTERPRETER, reason="of shapes alone")
def test_what_does_not_fit_is_named():
    packed = draw("int4", (2, 8, 64))
    with pytest.raises(ValueError, match="not whole groups of 32"):
        packed_shapes("int4", (2, 8, 40))
    with pytest.raises(ValueError, match="has data"):
        Packed("int4", packed.data, packed.scales[:, :4])
    with pytest.raises(ValueError, match=r"int4 weight is torch\.int32"):
        Packed("int4", packed.data.view(torch.uint8), packed.scales)
    with pytest.raises(ValueError, match="contiguous"):
        dequantise_(packed, torch.empty(2, 64, 8).mT)


@pytest.mark.skipif(INTERPRETER, reason="of scales alone")
def test_bad_scales():
    for form in ("int4", "fp8"):
        scales = draw(form, (2, 128, 64)).scales
        assert bad_scales(form, scales) is None
        for value, what in ((float("nan"), "finite"), (float("inf"), "finite"), (0.0, "zero")):
            broken = scales.clone()
            broken.view(-1)[1] = value
            assert what in (bad_scales(form, broken) or "")
    exponents = draw("mxfp4", (2, 8, 64)).scales
    assert bad_scales("mxfp4", exponents) is None
    exponents[1, 3, 1] = 255
    assert "1 scales" in (bad_scales("mxfp4", exponents) or "")


@pytest.mark.parametrize(
    ("path", "form", "before", "after"),
    [
        ("torch_path", "int4", "- 8\n        target.unflatten", "- 7\n        target.unflatten"),
        ("torch_path", "int4", "pairs & 15", "pairs & 7"),
        ("torch_path", "fp8", "to(dtype) * wide", "to(dtype) / wide"),
        ("torch_path", "mxfp4", "pairs >> 4]", "pairs & 15]"),
        ("triton_kernels", "int4", "& 15) - 8", "& 15) - 7"),
        ("triton_kernels", "fp8", "+ i0 // FP8_BLOCK", "+ i0 // (2 * FP8_BLOCK)"),
        ("triton_kernels", "mxfp4", "codes > 7", "codes > 9"),
    ],
)
def test_a_broken_kernel_is_seen(path, form, before, after, tmp_path, monkeypatch):
    break_dequantisation(monkeypatch, path, before, after, tmp_path)
    packed = draw(form, (1, 40, 288))
    got = dequantise(packed, torch.float32, KERNEL)
    assert not torch.equal(got, reference(packed, torch.float32))
