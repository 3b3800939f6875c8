"""rollout.stop on the real vLLM engine: a sample ends with the token that completes the text, and
is otherwise the sample that it would be without, on the same routes."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from engine_fixtures import EngineWithDisk, reference, save_random_model, start_engine
from letters import STOPS, letters_in_pairs

from lora_moe_rl.router_replay.table import RouteTable

pytestmark = [pytest.mark.slow, pytest.mark.whole]
EXACT = 1e-5  # logprobs, float32
LONGEST = 24


class Freed(EngineWithDisk):
    def use_stop(self, stop: tuple[str, ...]) -> None:
        self.sampling.stop = list(stop)
        self.config = self.config.model_copy(
            update={"rollout": self.config.rollout.model_copy(update={"stop": stop})}
        )

    def text_of(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def engine(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model = save_random_model("qwen3_moe", folder)
    letters_in_pairs().save_pretrained(folder)
    rollout = {"max_response_tokens": LONGEST, "stop": STOPS}
    with start_engine(model, folder, Freed, rollout=rollout) as running:
        yield running


def sampled(engine, version: int, stop: tuple[str, ...]):
    """40 samples of 4 prompts, and the rows of routes of each."""
    ray.get(engine.actor.use_stop.remote(stop))
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, 250, length).tolist() for length in (3, 7, 20, 1)]
    samples, table = engine.generate(prompts, 10, version)
    return samples, [rows_of(table, i) for i in range(len(samples))]


def rows_of(table: RouteTable, number: int) -> np.ndarray:
    rows = slice(table.offsets[number], table.offsets[number + 1])
    assert table.valid[rows].all()
    return np.sort(table.ids[rows], axis=-1)


def first_end(engine, ids: list[int]) -> tuple[int, str | None]:
    """How many tokens there are when a text is complete, and what stands behind it; all of them and
    None if none is."""
    for count in range(1, len(ids) + 1):
        text = ray.get(engine.actor.text_of.remote(ids[:count]))
        for stop in STOPS:
            if stop in text:
                return count, text[text.index(stop) + len(stop) :]
    return len(ids), None


def test_a_sample_ends_with_the_token_that_completes_the_text(engine):
    version = engine.new_version(engine.random_adapter(seed=1))
    free, routes = sampled(engine, version, ())
    cut, of_cut = sampled(engine, version, STOPS)
    behind, ended = set(), 0
    for i, (one, other) in enumerate(zip(cut, free, strict=True)):
        whole = other.response_ids.tolist()
        count, rest = first_end(engine, whole)
        assert one.response_ids.tolist() == whole[:count]
        np.testing.assert_allclose(one.logprobs, other.logprobs[:count], atol=EXACT, rtol=0)
        fed = len(one.prompt_ids) + count - 1
        np.testing.assert_array_equal(of_cut[i], routes[i][:fed])
        assert len(of_cut[i]) == fed
        assert one.finish_reason == (other.finish_reason if rest is None else "stop")
        ended += rest is not None
        behind.add(rest)
    assert ended > 20 and len(cut) - ended > 2, "all ended in one way"
    assert "" in behind and len(behind) > 4, "no text ended inside a token"


def test_its_logprobs_and_routes_are_those_of_the_merged_weights(engine):
    tensors = engine.random_adapter(seed=2)
    version = engine.new_version(tensors)
    samples, rows = sampled(engine, version, STOPS)
    with engine.merged(tensors) as model:
        for sample, own in zip(samples[::4], rows[::4], strict=True):
            logprobs, routes = reference(model, engine.spec, sample.token_ids.tolist())
            theirs = logprobs[len(sample.prompt_ids) - 1 :]
            np.testing.assert_allclose(sample.logprobs, theirs, atol=EXACT, rtol=0)
            np.testing.assert_array_equal(own, routes)
