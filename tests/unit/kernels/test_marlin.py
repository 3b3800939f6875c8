"""Experts in Marlin's layout, bit for bit: what vLLM's own processing makes of a checkpoint's
packed values, dequantised, is what the checkpoint dequantises to."""

import pytest
import torch
from kernel_cases import INTERPRETER, KERNEL, break_dequantisation
from packed_cases import draw

from lora_moe_rl.kernels.dequant import Packed, dequantise, dequantise_, naive
from lora_moe_rl.kernels.dequant.formats import MARLIN, packed_shapes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = list(MARLIN)
# (experts, width of one, hidden size). Kimi-K2-Thinking's: of an expert, and of an eighth of one.
SIZES = {"tiny": (3, 64, 128), "uneven": (2, 192, 384)}
KIMI = {"expert": (1, 2048, 7168), "an eighth": (1, 256, 7168)}


def drawn(form, sizes):
    """w13 and w2 as the checkpoint has them, and as vLLM lays them out."""
    marlin = pytest.importorskip("marlin")
    E, width, hidden = sizes
    plain = draw(form, (E, 2 * width, hidden)), draw(form, (E, hidden, width), seed=1)
    if form == "mxfp4":
        for one in plain:  # exponents at both ends, with which float32 has all values
            one.scales.view(-1)[:4] = torch.tensor([0, 1, 251, 252], dtype=torch.uint8)
    return plain, marlin.laid_out(*plain)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_what_vllm_lays_out_is_what_the_checkpoint_has(form, size, dtype):
    if INTERPRETER and dtype != torch.float32:
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds it")
    if form == "mxfp4" and dtype == torch.float16:
        pytest.skip("float16 has not the exponents of MXFP4")
    for plain, theirs in zip(*drawn(form, SIZES[size]), strict=True):
        assert theirs.form == MARLIN[form] and theirs.shape == plain.shape
        assert theirs.nbytes == plain.nbytes
        assert not torch.equal(theirs.data.view(-1), plain.data.reshape(-1).view(torch.int32))
        out = torch.full(plain.shape, float("nan"), dtype=dtype)
        assert same(dequantise_(theirs, out, KERNEL), dequantise(plain, dtype, "torch"))


@pytest.mark.skipif(INTERPRETER, reason="of torch's path alone")
@pytest.mark.parametrize("size", KIMI)
@pytest.mark.parametrize("form", FORMS)
def test_the_sizes_of_kimi_k2(form, size):
    for plain, theirs in zip(*drawn(form, KIMI[size]), strict=True):
        got = dequantise(theirs, torch.bfloat16)
        assert same(got, dequantise(plain, torch.bfloat16))


@pytest.mark.parametrize("form", FORMS)
def test_the_reference(form):
    _, (theirs, _) = drawn(form, SIZES["tiny"])
    theirs = theirs.of(slice(0, 1))
    make = getattr(naive, theirs.form)
    expected = make(theirs.data[0], theirs.scales[0], torch.float32)
    assert same(dequantise(theirs, torch.float32, KERNEL)[0], expected)


@pytest.mark.parametrize("form", FORMS)
def test_experts_may_stand_apart(form):
    _, (whole, _) = drawn(form, SIZES["tiny"])
    got = dequantise(whole.of(slice(0, 3, 2)), torch.float32, KERNEL)
    assert torch.equal(got, dequantise(whole, torch.float32, KERNEL)[::2])


@pytest.mark.skipif(INTERPRETER, reason="of shapes alone")
@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_named(form):
    with pytest.raises(ValueError, match="96 rows, which are not whole tiles of 64"):
        packed_shapes(MARLIN[form], (2, 96, 64))
    with pytest.raises(ValueError, match="not whole groups of 32"):
        packed_shapes(MARLIN[form], (2, 64, 48))
    data, scales = packed_shapes(MARLIN[form], (2, 64, 128))
    empty = torch.empty(scales)
    with pytest.raises(ValueError, match="has data"):
        Packed(MARLIN[form], torch.empty(data, dtype=torch.int32), empty[:, :1])
    with pytest.raises(ValueError, match=r"weight is torch\.int32"):
        Packed(MARLIN[form], torch.empty(data), empty)


@pytest.mark.parametrize(
    ("path", "form", "before", "after"),
    [
        ("torch_path", "int4", "n & 1, :, n >> 2]", "n >> 2, :, n & 1]"),
        ("torch_path", "int4", "n >> 1 & 1, :, :, n & 1", "n & 1, :, :, n >> 1 & 1"),
        ("torch_path", "int4", "(-1, 8, 8)).transpose(2, 3)", "(-1, 8, 8))"),
        ("torch_path", "mxfp4", "permute(0, 1, 3, 5, 4, 2)", "permute(0, 1, 3, 4, 5, 2)"),
        ("triton_kernels", "int4", "(3, 5, 1, 0, 6, 2, 4)", "(3, 5, 1, 0, 4, 2, 6)"),
        ("triton_kernels", "int4", "+ (o % 8) * 8 + (o // 8) % 8", "+ o % 64"),
        ("triton_kernels", "mxfp4", "% 2 * 2 + (o // 16) % 2", "% 2 + (o // 16) % 2 * 2"),
    ],
)
def test_a_broken_kernel_is_seen(path, form, before, after, tmp_path, monkeypatch):
    break_dequantisation(monkeypatch, path, before, after, tmp_path)
    (plain, _), (theirs, _) = drawn(form, SIZES["tiny"])
    got = dequantise(theirs, torch.float32, KERNEL)
    monkeypatch.undo()
    assert not torch.equal(got, dequantise(plain, torch.float32, "torch"))
