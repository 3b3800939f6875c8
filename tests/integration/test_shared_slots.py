"""Engines whose slots have once what all experts of a layer share (expert_layout=shared_outer),
against Hugging Face's forward of the merged weights."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from engine_fixtures import EngineWithDisk, save_random_model, start_engine
from test_rollout import assert_scores_equal, random_prompts

from lora_moe_rl.planner.rollout import slot_bytes

pytestmark = pytest.mark.slow


class CountedEngine(EngineWithDisk):
    """Tells what its workers hold."""

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        extension = {"worker_extension_cls": "counting_receiver.CountingReceiver"}
        return super()._engine_args(cpu) | extension

    async def slots(self) -> list[int]:
        """Elements of the adapter slots of each rank."""
        return [found["slots"] for found in await self.llm.collective_rpc("count")]


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_moe", {"tp": 2, "ep": True}),
        ("deepseek_v3", {"tp": 1}),
        ("qwen3_moe", {"tp": 2, "fully_sharded": True}),
    ],
)
def engine(request, ray_session, tmp_path_factory):
    family, cut = request.param
    folder = tmp_path_factory.mktemp(family)
    model = save_random_model(family, folder)
    settings = {
        "rollout": {"max_response_tokens": 24, **cut},
        "adapter": {"expert_layout": "shared_outer"},
    }
    with start_engine(model, folder, CountedEngine, **settings) as running:
        yield running


def test_they_serve_the_merged_weights_version_after_version(engine):
    sequences = random_prompts(1, [30, 12])
    base, _ = engine.score(sequences, None)
    for seed in (1, 2, 3):  # one more than there are slots
        tensors = engine.random_adapter(seed)
        version = engine.new_version(tensors)
        scores, table = engine.score(sequences, version)
        with engine.merged(tensors) as model:
            assert_scores_equal(engine, model, sequences, scores, table)
        assert all(abs(s - b).max() > 1e-2 for s, b in zip(scores, base, strict=True))


def test_their_slots_are_as_large_as_the_plan_says(engine):
    engine.new_version(engine.random_adapter(seed=4))
    planned = slot_bytes(engine.spec, engine.config, 1)
    first, *others = ray.get(engine.actor.slots.remote())
    # With slots cut along the rank the last ones have parts that no row of a smaller adapter
    # reaches: these are not counted.
    assert first == planned and all(one <= planned for one in others)
    assert engine.config.rollout.fully_sharded or {*others} <= {planned}
