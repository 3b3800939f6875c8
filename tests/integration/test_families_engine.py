"""Every family in the real vLLM engine: logprobs and routes of Hugging Face, base and adapted."""

from __future__ import annotations

from contextlib import nullcontext

import hf
import numpy as np
import pytest
import tiny_families
from engine_fixtures import reference, start_engine

from lora_moe_rl.adapters.families import FAMILIES
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify.hf import in_float64

pytestmark = pytest.mark.slow
EXACT = 5e-6  # logprobs, float32


# Qwen3-MoE and DeepSeek-V3 have tests of their own (test_rollout.py). Of the others, which take a
# minute each, those that are the only ones with their attention, norms or experts, and the dense.
ENGINES = [
    *("qwen2_moe", "deepseek_v2", "qwen3", "qwen3_next", "qwen3_5_moe_published"),
    *("gpt_oss", "olmoe", "minimax_m2", "glm4_moe_lite", "bailing_moe_v2"),
]
# The delta rule of transformers goes to float32 by itself, and so do Ling's norms and attention.
FLOAT32 = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_published", "bailing_moe_v2")


@pytest.mark.parametrize("name", ENGINES)
def test_engine_serves_the_merged_weights(name, ray_session, tmp_path):
    tiny_families.save(name, tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, tiny_families.VOCAB_SIZE, n).tolist() for n in (5, 17, 40, 200)]
    # In float64, so that all there is of rounding is the engine's own; grouped kernels have none.
    model = hf.load(tmp_path).double()
    dense = name in tiny_families.DENSE
    if not dense and FAMILIES[type(model).__name__].reference_class is None:
        model.set_experts_implementation("eager")
    exact = in_float64 if name in FLOAT32 else nullcontext
    settings = {"replay": {"mode": "off"}} if dense else {}
    with start_engine(model, tmp_path, **settings) as engine:
        tensors = engine.random_adapter(seed=1)
        version = engine.new_version(tensors)
        for served, adapter in ((None, None), (version, tensors)):
            # One at a time: which of them the engine takes together, and so the last bits, would
            # depend on when each arrives.
            found = [engine.score([ids], served) for ids in sequences]
            with engine.merged(adapter) as model, exact(model):
                expected = [reference(model, engine.spec, ids) for ids in sequences]
            for ((ours,), table), (logprobs, routes) in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, logprobs, atol=EXACT, rtol=0)
                np.testing.assert_array_equal(np.sort(table.ids, axis=-1), routes)
                assert table.coverage == 1.0
