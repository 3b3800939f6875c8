"""What an engine serves after a refit that failed. vLLM's workers are a fake here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.rollout.engine import RolloutEngine


class Workers:
    """`refuses`: the method that they answer with an error."""

    errored, refuses = False, ""

    async def collective_rpc(self, method, timeout, args):
        return [{"error": "worker 0: no"} if method == self.refuses else {}]


def serving(version: int, slots: int) -> RolloutEngine:
    engine = RolloutEngine(RunConfig(refit={"slots": slots}), "model", SimpleNamespace(), 0)
    engine.llm, engine.layouts = Workers(), [PartLayout(0, "float32", 0, ())]
    asyncio.run(publish(engine, version))
    return engine


async def publish(engine: RolloutEngine, version: int):
    return await engine.publish(version, SentPart(0, version, "", 0, ()))


@pytest.mark.parametrize("stage", ["refit_stage", "refit_commit"])
def test_with_one_slot_a_refit_that_fails_says_that_nothing_is_served(stage):
    engine = serving(1, slots=1)
    engine.llm.refuses = stage
    with pytest.raises(RefitError, match="worker 0: no; engine 0 serves no version now"):
        asyncio.run(publish(engine, 2))
    assert not engine.receipts


def test_with_two_slots_a_refit_that_fails_leaves_the_version_before():
    engine = serving(1, slots=2)
    engine.llm.refuses = "refit_stage"
    with pytest.raises(RefitError) as caught:
        asyncio.run(publish(engine, 2))
    assert "serves no version" not in str(caught.value) and list(engine.receipts) == [1]
