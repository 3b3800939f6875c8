"""Trainer and engines that take turns on the same devices: a real engine that gives its cache of
keys and values back, and whole runs beside those that give nothing back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray
from cli_run import RECIPE, trained
from engine_fixtures import EngineUnderTest, EngineWithDisk, save_random_model, start_engine
from test_golden import runs

from lora_moe_rl.data.samples import Sample

pytestmark = pytest.mark.slow
CACHE_GIB = 0.5
EXACT = 1e-5  # logprobs, float32
PROMPT = list(range(20, 20 + 200))  # longer than a block of the cache, so that prefixes are kept


class ForgetfulEngine(EngineWithDisk):
    """Can lose its cache without a word to vLLM, which goes on reading it."""

    async def lose(self) -> None:
        await self.llm.collective_rpc("discard", args=(("kv_cache",),))


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def engine(request, ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = save_random_model(request.param, folder)
    settings = {
        "rollout": {"max_response_tokens": 24, "cpu_kv_cache_gib": CACHE_GIB},
        "placement": {"mode": "colocated"},
    }
    with start_engine(model, folder, ForgetfulEngine, 512, **settings) as running:
        yield running


def sample(engine: EngineUnderTest, version: int) -> list[Sample]:
    return engine.generate([PROMPT], 4, version)[0]


def equal(some: list[Sample], others: list[Sample]) -> bool:
    """Up to what depends on how vLLM batches them."""
    return all(
        np.array_equal(one.response_ids, other.response_ids)
        and np.allclose(one.logprobs, other.logprobs, atol=EXACT, rtol=0)
        for one, other in zip(some, others, strict=True)
    )


def take_turns(engine: EngineUnderTest) -> float:
    given = ray.get(engine.actor.give_way.remote())
    ray.get(engine.actor.wake.remote("kv_cache"))
    return given


def test_the_cache_is_given_back_and_samples_are_as_before(engine):
    """Every page of it is in use before that: vLLM writes zeros into all of them. The first turn
    and the second give back what was written, not what was reserved."""
    version = engine.new_version(engine.random_adapter(1))
    before = sample(engine, version)
    given = take_turns(engine)
    assert given == pytest.approx(CACHE_GIB, rel=0.1)
    assert equal(sample(engine, version), before)
    assert 0 < take_turns(engine) < CACHE_GIB / 4


def test_a_slot_is_written_while_the_cache_is_away(engine):
    tensors = engine.random_adapter(2)
    undisturbed = sample(engine, engine.new_version(tensors))
    engine.new_version(engine.random_adapter(3))
    ray.get(engine.actor.give_way.remote())
    version = engine.new_version(tensors)
    ray.get(engine.actor.wake.remote("kv_cache"))
    assert equal(sample(engine, version), undisturbed)


def test_a_cache_that_is_lost_without_a_word_is_seen(engine):
    """What would be sampled if prefixes were not forgotten with the cache."""
    if engine.spec.shape.family.attention == "mla":
        pytest.skip("vLLM's CPU build keeps no prefixes of MLA")
    version = engine.new_version(engine.random_adapter(4))
    before = sample(engine, version)
    ray.get(engine.actor.lose.remote())
    assert not equal(sample(engine, version), before)
    take_turns(engine)
    assert equal(sample(engine, version), before)


@pytest.mark.parametrize("mode", [pytest.param("adapter", marks=pytest.mark.whole), "merged"])
def test_a_run_that_takes_turns_is_the_run_that_does_not(tmp_path: Path, mode):
    """Metrics but for clocks, samples and adapter are equal to the bit."""
    settings = "trainer.steps=3", f"refit.mode={mode}", "logging.samples_per_step=8"
    apart, turns = tmp_path / "split", tmp_path / "colocated"
    usual = trained(apart, RECIPE, *settings)
    records = trained(turns, RECIPE, *settings, "placement.mode=colocated")
    assert runs.figures(turns) == runs.figures(apart) and len(records) == 3
    for record in records:
        assert record["placement/given_back"] > 0
        assert min(record[f"placement/{what}_seconds"] for what in ("give_way", "come_back")) > 0
    assert not any(name.startswith("placement/") for record in usual for name in record)
