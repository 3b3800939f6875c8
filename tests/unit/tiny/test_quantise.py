"""MXFP4 as it is written, against what compressed-tensors makes of the same scales."""

from __future__ import annotations

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from lora_moe_rl.kernels.merge.formats import dequantise_mxfp4, quantise_mxfp4

ARGS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}


def test_weights_are_packed_as_compressed_tensors_does():
    torch.manual_seed(0)
    weight = torch.randn(6, 96) * torch.logspace(-3, 2, 6)[:, None]
    check(weight)


def test_halves_zeros_and_the_smallest_groups_too():
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.9, 0.0])
    row = torch.cat([values, -values, values / 3])[:32]
    small = torch.nn.functional.pad(row, (0, 32 - len(row)))
    check(torch.stack([small, small * 2.0**-60, torch.zeros(32)]))


def test_what_is_quantised_already_stays_as_it_is():
    packed, exponents = quantise_mxfp4(torch.randn(4, 64))
    values = dequantise_mxfp4(packed, exponents)
    again = quantise_mxfp4(values)
    assert torch.equal(again[1], exponents)
    assert torch.equal(dequantise_mxfp4(*again), values)


def check(weight: torch.Tensor) -> None:
    packed, exponents = quantise_mxfp4(weight)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**ARGS))
    scales = (exponents.float() - 127).exp2()
    state = {"weight": weight, "weight_scale": scales}
    theirs = MXFP4PackedCompressor.compress(state, scheme)
    assert torch.equal(theirs["weight_scale"].to(torch.uint8), exponents)
    assert torch.equal(theirs["weight_packed"], packed)
