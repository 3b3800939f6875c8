"""Speculative decoding in the real vLLM engine: samples, logprobs and routes are the policy's, as
Hugging Face computes them, whatever was guessed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from cli_run import RECIPE, CliRun
from engine_fixtures import EngineUnderTest, reference, save_random_model, start_engine
from safetensors.torch import load_file, save_file

from lora_moe_rl.ports import Manner
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify.hf import in_float64

pytestmark = pytest.mark.timeout(900)
EXACT = 2e-6  # logits, float32
TEMPERATURE = 0.1
FROM_TOKENS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1
}  # fmt: skip
OF_THE_BASE = {"method": "draft_model", "num_speculative_tokens": 2}
OF_ITS_LAYER = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def engine(request, ray_session, tmp_path_factory) -> Iterator[EngineUnderTest]:
    """Guesses by the base, of all of which it would have said itself, or by a prediction layer."""
    folder = tmp_path_factory.mktemp(request.param)
    # At this temperature the rounding of a float32 reference is as large as the engine's.
    model = save_random_model(request.param, folder).double()
    guesses = OF_THE_BASE | {"model": str(folder)}
    if request.param == "deepseek_v3":
        guesses = OF_ITS_LAYER
        add_prediction_layer(folder)
    rollout = {
        "max_response_tokens": 40, "temperature": TEMPERATURE,
        "engine_args": {"speculative_config": guesses},
    }  # fmt: skip
    with start_engine(model, folder, rollout=rollout) as running:
        yield running


def add_prediction_layer(folder: Path) -> None:
    """As DeepSeek-V3 has one: here it does with the last hidden state what the last layer did."""
    config = json.loads((folder / "config.json").read_text())
    layers, size = config["num_hidden_layers"], config["hidden_size"]
    base = load_file(folder / "model.safetensors")
    last, more = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors = {
        more + name.removeprefix(last): value
        for name, value in base.items()
        if name.startswith(last)
    }
    tensors |= {
        more + "enorm.weight": torch.ones(size),
        more + "hnorm.weight": torch.ones(size),
        more + "eh_proj.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1),
        more + "embed_tokens.weight": base["model.embed_tokens.weight"],
        more + "shared_head.norm.weight": base["model.norm.weight"],
        more + "shared_head.head.weight": base["lm_head.weight"],
    }
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "more.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def prompts_that_repeat(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [
        np.tile(generator.integers(16, 250, size), times).tolist()
        for size, times in ((3, 4), (5, 3), (2, 9), (7, 2), (4, 1))
    ]


def sampled(engine: EngineUnderTest, seed: int, prompts: list[list[int]], n: int = 5):
    """Samples of a policy that is near the base, their routes, and its adapter."""
    tensors = engine.random_adapter(seed)
    tensors = {name: value * (1 if name.endswith("A") else 0.3) for name, value in tensors.items()}
    version = engine.new_version(tensors)
    return *engine.generate(prompts, n, version), tensors, version


@pytest.mark.minute
def test_logprobs_and_routes_are_the_policys(engine):
    samples, table, tensors, _ = sampled(engine, 2, prompts_that_repeat(2))
    guessed, taken = np.sum([sample.segments[1].drafts for sample in samples], axis=0)
    assert guessed > 200 and taken > 20
    with engine.merged(tensors) as model, in_float64(model):
        for i, sample in enumerate(samples):
            token_ids = sample.token_ids.tolist()
            logprobs, routes = reference(model, engine.spec, token_ids, TEMPERATURE)
            theirs = logprobs[len(sample.prompt_ids) - 1 :]
            np.testing.assert_allclose(sample.logprobs, theirs, atol=EXACT / TEMPERATURE, rtol=0)
            rows = slice(table.offsets[i], table.offsets[i + 1])
            np.testing.assert_array_equal(np.sort(table.ids[rows], axis=-1), routes)
    assert table.coverage == 1.0


def test_samples_depend_on_the_seed_alone(engine):
    prompts = prompts_that_repeat(3)
    together, _, _, version = sampled(engine, 3, prompts)
    alone, _ = engine.generate(prompts[:2], 5, version)
    assert [one.response_ids.tolist() for one in alone] == [
        one.response_ids.tolist() for one in together[:10]
    ]


def test_what_is_taken_is_drawn_from_the_policy(engine):
    """Over all tokens the logprob of what was sampled is the negative entropy on average: a guess
    that is taken too often, or too seldom, pulls it to one side."""
    samples, _, tensors, _ = sampled(engine, 4, prompts_that_repeat(4), n=40)
    found, expected, variance = 0.0, 0.0, 0.0
    with engine.merged(tensors) as model, in_float64(model), torch.no_grad():
        for sample in samples:
            start, token_ids = len(sample.prompt_ids) - 1, sample.token_ids.tolist()
            logits = model(torch.tensor([token_ids])).logits[0, start:-1].double()
            logprobs = (logits / TEMPERATURE).log_softmax(-1)
            mean = (logprobs.exp() * logprobs).sum(-1)
            found += float(sample.logprobs.sum())
            expected += float(mean.sum())
            variance += float(((logprobs - mean[:, None]) ** 2 * logprobs.exp()).sum())
    assert abs(found - expected) < 4 * variance**0.5


def test_a_stop_string_ends_a_sample_within_what_was_taken_at_once(engine):
    """As the sample without it, up to the token that completes it."""
    prompts, tokenizer = prompts_that_repeat(5), make_tokenizer()
    whole, _, _, version = sampled(engine, 5, prompts, n=1)
    ended = 0
    for place, (prompt, sample) in enumerate(zip(prompts, whole, strict=True)):
        tokens = sample.response_ids.tolist()
        for i in range(2, len(tokens), 2):
            stop = tokenizer.decode(tokens[i : i + 1], skip_special_tokens=False)
            first = tokens.index(tokens[i])
            if not stop.isascii():
                continue  # a part of a character
            manner = Manner(temperature=TEMPERATURE, stop=(stop,))
            asked = engine.actor.sample.remote(prompt, 1, version, 1000 * place, None, manner)
            ((found,), _) = ray.get(asked)
            assert found.response_ids.tolist() == tokens[: first + 1]
            assert found.finish_reason == "stop"
            ended += first < len(tokens) - 1
    assert ended > 10


@pytest.mark.slow
@pytest.mark.whole
def test_a_run_tells_what_guesses_are_worth(tmp_path):
    run = CliRun(
        "train", RECIPE, "trainer.steps=2", f"logging.run_dir={tmp_path / 'run'}",
        f"rollout.engine_args.speculative_config={json.dumps(FROM_TOKENS)}",
        output=tmp_path / "out",
    )  # fmt: skip
    try:
        assert run.finish() == 0, run.output
    finally:
        run.end()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["mismatch/kl"] < 1e-10 and record["replay/coverage"] == 1.0
        assert 0 <= record["rollout/draft_acceptance"] <= 1
        assert record["rollout/tokens_per_forward"] >= 1
