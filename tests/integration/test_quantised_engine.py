"""The real vLLM engine on a quantised base, with adapters, against the dequantised model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray
from engine_fixtures import EngineWithDisk, reference, start_engine
from quantised import make_pair
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow
EXACT = 1e-5  # logprobs, float32


class EngineThatTells(EngineWithDisk):
    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        extension = {"worker_extension_cls": "telling_receiver.TellingReceiver"}
        return super()._engine_args(cpu) | extension

    async def experts(self) -> list[list[str]]:
        return await self.llm.collective_rpc("experts")


SERVED = {"int4": "Int4LoRAExperts torch.uint8", "fp8": "Fp8LoRAExperts torch.float8_e4m3fn"}
CASES = [
    *((form, name, "tp1") for form in SERVED for name in ("qwen3_moe", "deepseek_v3")),
    ("int4", "qwen3_moe", "tp2"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def quantised(request, ray_session, tmp_path_factory):
    form, name, tp = request.param
    rollout = {"max_response_tokens": 24, "stop_token_ids": tuple(range(16)), "tp": int(tp[-1])}
    packed, plain = make_pair(name, tmp_path_factory.mktemp(name), form)
    model = AutoModelForCausalLM.from_pretrained(plain).float().eval()
    with start_engine(model, packed, EngineThatTells, rollout=rollout) as running:
        assert ray.get(running.actor.experts.remote()) == [[SERVED[form]]] * rollout["tp"]
        yield running


@pytest.mark.parametrize("adapted", [False, True])
def test_scores_are_those_of_the_dequantised_model(quantised, adapted):
    tensors = quantised.random_adapter(seed=5) if adapted else None
    version = quantised.new_version(tensors) if adapted else None
    generator = np.random.default_rng(3)
    sequences = [generator.integers(16, 250, length).tolist() for length in (30, 12, 3)]
    scores, table = quantised.score(sequences, version)
    with quantised.merged(tensors) as model:
        for i, (token_ids, ours) in enumerate(zip(sequences, scores, strict=True)):
            logprobs, routes = reference(model, quantised.spec, token_ids)
            np.testing.assert_allclose(ours, logprobs, atol=EXACT, rtol=0)
            rows = slice(table.offsets[i], table.offsets[i + 1])
            np.testing.assert_array_equal(np.sort(table.ids[rows], axis=-1), routes)


def test_samples_are_those_of_the_merged_weights(quantised):
    tensors = quantised.random_adapter(seed=1)
    version = quantised.new_version(tensors)
    samples, _ = quantised.generate([[20, 30, 40], [50]], 3, version)
    with quantised.merged(tensors) as model:
        for sample in samples:
            logprobs, _ = reference(model, quantised.spec, sample.token_ids.tolist())
            theirs = logprobs[len(sample.prompt_ids) - 1 :]
            np.testing.assert_allclose(sample.logprobs, theirs, atol=EXACT, rtol=0)
