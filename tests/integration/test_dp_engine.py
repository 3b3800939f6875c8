"""Engines whose experts are spread over data-parallel ranks, against Hugging Face's forward.

Two real ranks with a scheduler and a KV cache each, and half of the experts. What is asked of one
rank alone, the other takes part in by steps without a request.
"""

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest
import ray
from engine_fixtures import (
    EngineUnderTest,
    EngineWithDisk,
    reference,
    save_random_model,
    start_engine,
)
from test_rollout import assert_scores_equal, random_prompts

from lora_moe_rl.errors import EngineDied
from lora_moe_rl.planner.base import base_tensors
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.rollout import engine_shape, slot_bytes
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.dp_ranks import every_worker

pytestmark = pytest.mark.slow
EXACT = 1e-5  # logprobs, float32


class EngineOfRanks(EngineWithDisk):
    """Can be asked on one of its ranks alone, and tells of its processes."""

    async def score_at(self, rank: int, sequences: list[list[int]], version: int | None):
        asked = [
            self._request(ids, outputs.scoring_params(), version, rank=rank) for ids in sequences
        ]
        return outputs.scores_and_routes(await asyncio.gather(*asked), self.spec.shape)

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        extension = {"worker_extension_cls": "counting_receiver.CountingReceiver"}
        return super()._engine_args(cpu) | extension

    async def count(self) -> list[dict[str, int]]:
        return await every_worker(self.llm, "count", 60, ())

    async def kill_a_rank(self) -> None:
        """The last one: the first has the engine's front beside it."""
        processes = self.llm.engine_core.resources.engine_manager.processes
        os.kill(processes[-1].pid, signal.SIGKILL)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def engine(request, ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    rollout = {
        "dp": 2, "ep": True, "max_response_tokens": 24, "stop_token_ids": tuple(range(16))
    }  # fmt: skip
    model = save_random_model(request.param, folder)
    with start_engine(model, folder, EngineOfRanks, rollout=rollout) as running:
        yield running


def score_at(engine: EngineUnderTest, rank: int, sequences, version):
    call = engine.actor.score_at.options(num_returns=2)
    return ray.get(call.remote(rank, sequences, version))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_serves_versions_and_base_while_the_other_has_nothing_to_do(engine, rank):
    tensors = [engine.random_adapter(seed) for seed in (1, 2)]
    versions = [engine.new_version(one) for one in tensors]
    sequences = random_prompts(1, [9, 17, 30])
    for version, one in zip([*versions, None], [*tensors, None], strict=True):
        scores, table = score_at(engine, rank, sequences, version)
        with engine.merged(one) as model:
            assert_scores_equal(engine, model, sequences, scores, table)


def test_ranks_at_work_on_different_versions_do_not_mix_them_up(engine):
    tensors = [engine.random_adapter(seed) for seed in (3, 4)]
    versions = [engine.new_version(one) for one in tensors]
    sequences = random_prompts(2, [40, 41, 42, 43])
    call = engine.actor.score_at.options(num_returns=2)
    cases = [(0, *pair) for pair in zip(versions, tensors, strict=True)]
    cases += [(1, versions[1], tensors[1]), (1, None, None)]
    asked = [call.remote(rank, sequences, version) for rank, version, _ in cases]
    for refs, (_, _, one) in zip(asked, cases, strict=True):
        scores, table = ray.get(refs)
        with engine.merged(one) as model:
            assert_scores_equal(engine, model, sequences, scores, table)


def test_samples_are_those_of_the_merged_weights(engine):
    tensors = engine.random_adapter(seed=5)
    version = engine.new_version(tensors)
    samples, table = engine.generate(random_prompts(3, [3, 7, 20, 1]), 3, version)
    assert table.coverage == 1.0
    with engine.merged(tensors) as model:
        for i, sample in enumerate(samples):
            rows = slice(table.offsets[i], table.offsets[i + 1])
            logprobs = hf_logprobs(engine, model, sample.token_ids.tolist(), table.ids[rows])
            given = logprobs[len(sample.prompt_ids) - 1 :]
            np.testing.assert_allclose(sample.logprobs, given, atol=EXACT, rtol=0)


def hf_logprobs(engine, model, token_ids, routes):
    logprobs, chosen = reference(model, engine.spec, token_ids)
    np.testing.assert_array_equal(np.sort(routes, axis=-1), chosen)
    return logprobs


def test_each_rank_holds_what_the_plan_says(engine):
    """Experts and slots, to the element."""
    engine.new_version(engine.random_adapter(seed=6))
    facts, rollout = find(engine.config.model.path), engine.config.rollout
    ways = rollout.tp, rollout.ep, rollout.dp
    planned = [one for one in base_tensors(facts) if one.part == "experts"]
    experts = sum(int(np.prod(engine_shape(facts, one, *ways))) for one in planned)
    slots = slot_bytes(engine.spec, engine.config, 1)
    held = {"experts": experts, "slots": slots}
    assert ray.get(engine.actor.count.remote()) == [held] * rollout.dp


def test_the_end_of_a_rank_is_the_end_of_the_engine(engine):
    """Comes last."""
    version = engine.new_version(engine.random_adapter(seed=7))
    ray.get(engine.actor.kill_a_rank.remote())
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        score_at(engine, 0, random_prompts(4, [20]), version)
    assert isinstance(raised.value.cause, EngineDied)
