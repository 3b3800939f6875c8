"""What stands for activations in front of FP8 kernels, against vLLM's own quantiser."""

from __future__ import annotations

import pytest
import torch
from packed_cases import draw

from lora_moe_rl.kernels.fp8_rounding import quantise, rounded
from lora_moe_rl.kernels.packed_linear import packed_linear


@pytest.fixture(scope="module")
def of_vllm():
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        return QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [128, 384, 96, 200])
def test_the_bits_of_vllm(of_vllm, width, dtype):
    generator = torch.Generator().manual_seed(width)
    sizes = torch.logspace(-1, 3, 50)[:, None]  # vLLM's torch path knows no smaller groups
    x = (torch.randn(50, width, generator=generator) * sizes).to(dtype)
    q, scales = quantise(x)
    expected_q, expected_scales = of_vllm.forward_native(x)
    assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_small_groups_keep_their_digits():
    """As of vLLM's kernels on GPUs, whose scales have no floor but that of a group of zeros."""
    x = torch.cat([torch.full((1, 128), 1e-6), torch.zeros(1, 128)])
    torch.testing.assert_close(rounded(x), x)


def test_gradients_pass_as_they_come():
    packed = draw("fp8", (1, 256, 128))
    x = torch.randn(5, 128, requires_grad=True)
    dy = torch.randn(5, 256)
    y = packed_linear(rounded(x), packed, [5])
    plain = packed_linear(x, packed, [5])
    assert 1e-3 < (y - plain).norm() / plain.norm() < 0.05
    assert torch.equal(*(torch.autograd.grad(out, x, dy)[0] for out in (y, plain)))
