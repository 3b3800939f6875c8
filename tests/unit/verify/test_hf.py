"""The float64 forward of `verify`, beside the float32 one."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_families
import torch

from lora_moe_rl.verify import hf


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_float64_forward_is_float64_throughout(name, tmp_path):
    """Linears in float64 alone would leave what norms and routers lose in float32."""
    tiny_families.save(name, tmp_path)
    sequence = np.random.default_rng(0).integers(0, 90, 30).tolist()
    single, model = hf.load(tmp_path), hf.load(tmp_path).double()
    (exact,) = hf.exact_logprobs(model, [sequence])
    assert exact.dtype == np.float64
    assert 0 < np.abs(hf.logprobs(single, sequence) - exact).max() < 5e-6
    with torch.no_grad():  # a change that no float32 could show comes through
        for norm in (one for n, one in model.named_parameters() if n.endswith("norm.weight")):
            norm *= 1 + 1e-10
    (moved,) = hf.exact_logprobs(model, [sequence])
    assert 0 < np.abs(moved - exact).max() < 1e-8


def test_a_float32_within_it_is_refused(tmp_path):
    tiny_families.save("qwen3_moe", tmp_path)
    with pytest.raises(RuntimeError, match="float32 for float64"):
        hf.exact_logprobs(hf.load(tmp_path), [[1, 2, 3]])
