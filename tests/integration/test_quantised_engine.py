"""The real vLLM engine on a quantised base, with adapters, against the dequantised model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import ray
from engine_fixtures import EngineWithDisk, reference, start_engine
from quantised import make_pair
from torch.nn import functional
from transformers import AutoModelForCausalLM

from lora_moe_rl.rollout.dp_ranks import every_worker

pytestmark = pytest.mark.slow
EXACT = 1e-5  # logprobs, float32


class EngineThatTells(EngineWithDisk):
    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        extension = {"worker_extension_cls": "telling_receiver.TellingReceiver"}
        return super()._engine_args(cpu) | extension

    async def experts(self) -> list[list[str]]:
        if self.config.rollout.dp == 1:
            return await self.llm.collective_rpc("experts")
        return await every_worker(self.llm, "experts", 60, ())


SERVED = {
    "int4": "Int4LoRAExperts torch.uint8",
    "fp8": "Fp8LoRAExperts torch.float8_e4m3fn",
    "mxfp4": "Mxfp4LoRAExperts torch.uint8",
}
CASES = [
    *((form, name, "tp1") for form in SERVED for name in ("qwen3_moe", "deepseek_v3")),
    ("int4", "qwen3_moe", "tp2"),
    *((form, "qwen3_moe", "dp2") for form in SERVED),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def quantised(request, ray_session, tmp_path_factory):
    form, name, layout = request.param
    size, ranks = layout[:2], int(layout[2:])
    rollout = {"max_response_tokens": 24, "stop_token_ids": tuple(range(16))}
    rollout |= {size: ranks, "ep": size == "dp"}
    packed, plain = make_pair(name, tmp_path_factory.mktemp(name), form)
    model = AutoModelForCausalLM.from_pretrained(plain).float().eval()
    with start_engine(model, packed, EngineThatTells, rollout=rollout) as running:
        assert ray.get(running.actor.experts.remote()) == [[SERVED[form]]] * ranks
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


@contextmanager
def read_in_8_bits(model, monkeypatch):
    """Inside, the model's FP8 linears read what vLLM's own quantiser makes of their inputs."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        quantiser = QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=False)
    fp8 = {
        weight.untyped_storage().data_ptr()
        for name, weight in model.named_parameters()
        if "_proj" in name and "kv_b_proj" not in name
    }
    linear = functional.linear

    def rounded_first(x, weight, bias=None):
        if weight.untyped_storage().data_ptr() in fp8 and len(rows := x.flatten(0, -2)):
            q, scales = quantiser.forward_native(rows)
            wide = scales.repeat_interleave(128, dim=-1)[:, : x.shape[-1]]
            x = (q.float() * wide).view(x.shape)
        return linear(x, weight, bias)

    with monkeypatch.context() as patched:
        patched.setattr(functional, "linear", rounded_first)
        yield


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_activations_in_8_bits_are_vllms(name, ray_session, tmp_path, monkeypatch):
    """The last bit of a float32 becomes a step of e4m3 now and then, or another route: hence the
    median."""
    packed, plain = make_pair(name, tmp_path, "fp8")
    model = AutoModelForCausalLM.from_pretrained(plain, experts_implementation="eager")
    model = model.float().eval()
    generator = np.random.default_rng(3)
    sequences = [generator.integers(16, 250, length).tolist() for length in (60, 40, 20)]
    rollout = {"max_response_tokens": 24}
    trainer = {"fp8_forward": "engine"}
    with start_engine(model, packed, EngineThatTells, rollout=rollout, trainer=trainer) as engine:
        (served,) = ray.get(engine.actor.experts.remote())
        assert served == ["RoundingLoRAExperts torch.float8_e4m3fn"]
        scores, _ = engine.score(sequences, None)
        plain_scores = [reference(model, engine.spec, ids)[0] for ids in sequences]
        with read_in_8_bits(model, monkeypatch):
            in_8_bits = [reference(model, engine.spec, ids)[0] for ids in sequences]
    ours = np.concatenate(scores)
    every = [np.abs(ours - np.concatenate(one)) for one in (in_8_bits, plain_scores)]
    off, without = map(np.median, every)
    print(name, off, without, [np.quantile(one, (0.1, 0.25, 0.75, 0.9)) for one in every])
    assert off < 1e-3 and without > 10 * off
