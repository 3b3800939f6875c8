"""Linears over quantised experts: the numbers of dequantised ones, from what is packed alone."""

import pytest
import torch
from packed_cases import draw

from lora_moe_rl.kernels import packed_linear as module
from lora_moe_rl.kernels.dequant import dequantise
from lora_moe_rl.kernels.grouped_linear import grouped_linear
from lora_moe_rl.kernels.packed_linear import Scratch, packed_linear

SHAPE = (5, 128, 64)
COUNTS = [3, 0, 7, 1, 0]


@pytest.fixture(autouse=True)
def scratch(monkeypatch):
    monkeypatch.setattr(module, "SCRATCH", Scratch())
    return module.SCRATCH


def both(form, counts, dtype=torch.float32):
    """(y, dx) of ours, and of the dequantised weights."""
    packed = draw(form, (len(counts), *SHAPE[1:]))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), SHAPE[2], generator=generator).to(dtype)
    dy = torch.randn(sum(counts), SHAPE[1], generator=generator).to(dtype)
    results = []
    for call in (
        lambda x: packed_linear(x, packed, counts),
        lambda x: grouped_linear(x, dequantise(packed, dtype), counts),
    ):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    return results


@pytest.mark.parametrize("room", ["all", "two", "less than one"])
@pytest.mark.parametrize("form", ["int4", "fp8", "mxfp4"])
def test_the_bits_of_dequantised_weights(form, room, monkeypatch):
    one = SHAPE[1] * SHAPE[2] * 4
    sizes = {"all": 2**28, "two": 2 * one, "less than one": one - 1}
    monkeypatch.setattr(module, "SCRATCH_BYTES", {"cpu": sizes[room]})
    (y, dx), (expected_y, expected_dx) = both(form, COUNTS)
    assert torch.equal(y, expected_y) and torch.equal(dx, expected_dx)
    held = {"all": 5, "two": 2, "less than one": 1}[room]
    assert module.SCRATCH.nbytes == held * one


def test_bfloat16():
    (y, dx), (expected_y, expected_dx) = both("int4", COUNTS, torch.bfloat16)
    assert torch.equal(y, expected_y) and torch.equal(dx, expected_dx)


def test_no_tokens():
    (y, dx), _ = both("int4", [0, 0])
    assert y.shape == (0, SHAPE[1]) and dx.shape == (0, SHAPE[2])


def test_layers_share_one_buffer_and_are_not_mixed_up(scratch):
    layers = [draw("int4", SHAPE, seed) for seed in (0, 1)]
    x = torch.randn(sum(COUNTS), SHAPE[2], requires_grad=True)
    y = [packed_linear(x, packed, COUNTS) for packed in layers]
    assert len(scratch.buffers) == 1
    expected = sum(
        torch.autograd.grad(grouped_linear(x, dequantise(p, x.dtype), COUNTS).sum(), x)[0]
        for p in layers
    )
    (got,) = torch.autograd.grad(y[0].sum() + y[1].sum(), x)
    torch.testing.assert_close(got, expected)


def test_a_backward_after_its_own_forward_dequantises_nothing(monkeypatch):
    calls = []
    real = module.dequantise_
    monkeypatch.setattr(module, "dequantise_", lambda *a: calls.append(a) or real(*a))
    packed = draw("int4", SHAPE)
    x = torch.randn(sum(COUNTS), SHAPE[2], requires_grad=True)
    packed_linear(x, packed, COUNTS).sum().backward()
    assert len(calls) == 1
    packed.data.zero_()  # as loading writes into it
    y = packed_linear(x, packed, COUNTS)
    assert len(calls) == 2
    expected = grouped_linear(x, dequantise(packed, x.dtype), COUNTS)
    assert torch.equal(y, expected)


def test_nothing_but_packed_bytes_is_kept():
    packed = draw("int4", SHAPE)
    x = torch.randn(sum(COUNTS), SHAPE[2], requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        packed_linear(x, packed, COUNTS)
    assert kept == []
