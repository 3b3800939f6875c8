"""MXFP4 as it is written, against what compressed-tensors makes of the same scales."""

from __future__ import annotations

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from lora_moe_rl.tiny.quantise import quantise_mxfp4

ARGS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}


def test_weights_are_packed_as_compressed_tensors_does():
    torch.manual_seed(0)
    weight = torch.randn(6, 96) * torch.logspace(-3, 2, 6)[:, None]
    packed, exponents = quantise_mxfp4(weight)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**ARGS))
    scales = (exponents.float() - 127).exp2()
    state = {"weight": weight, "weight_scale": scales}
    theirs = MXFP4PackedCompressor.compress(state, scheme)
    assert torch.equal(theirs["weight_scale"].to(torch.uint8), exponents)
    assert torch.equal(theirs["weight_packed"], packed)
