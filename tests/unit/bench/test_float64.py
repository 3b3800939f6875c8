"""A forward in float64, against Hugging Face's own in float32 and against itself in part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lora_moe_rl.bench import float64
from lora_moe_rl.bench.model import save_random
from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, build_model

SEQUENCE = [3, 17, 5, 200, 41, 8, 99]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_forward_in_float64_is_what_float32_is_rounded_from(name, tmp_path):
    save_random(tmp_path, lambda: build_model(name), EXTRA_CONFIG[name])
    (found,) = float64.logprobs(0, tmp_path, [SEQUENCE])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        every = model(torch.tensor([SEQUENCE])).logits[0, :-1].log_softmax(-1)
    theirs = every.gather(-1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0].numpy()
    assert found.dtype == np.float64
    assert 0 < np.abs(found - theirs).max() < 1e-5


def test_nothing_in_it_is_rounded_to_float32():
    """What norms and routers do with what they are given."""
    x = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    with float64.InFloat64():
        for made in (x.float(), x.to(torch.float32), x.to(dtype=torch.float32)):
            assert made.dtype == torch.float64 and made[0] != made[1]
        assert torch.softmax(x, 0, dtype=torch.float32).dtype == torch.float64
    assert x.float().dtype == torch.float32
