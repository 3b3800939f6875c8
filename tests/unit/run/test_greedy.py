"""What the reward of a greedy sample is to its group."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import Details
from lora_moe_rl.errors import EngineDied
from lora_moe_rl.run.greedy import beside, with_baseline

ALGORITHM = algorithms.make(
    RunConfig(
        algorithm={"advantage": "remax", "overlong_buffer": 8},
        rollout={"max_response_tokens": 16},
    )
)
NAN = float("nan")


def group(*rewards: float, failures=(), conversations=None, length=2) -> Group:
    parts = Segment.given("user", [1]), Segment.sampled([7] * length, np.zeros(length), 0)
    rewards = np.array(rewards, np.float32)
    details = Details(reasons={i: why for i, why in enumerate(failures) if why})
    failures = [why for why in failures if why]
    return Group(Prompt(3, "", [1]), [Sample(parts, "stop", "")] * len(rewards), None, rewards,
                 failures, details, conversations)  # fmt: skip


def test_it_is_what_counts_of_its_reward():
    """Of 1, four tokens into the buffer of 8, one half; of a conversation of two samples once."""
    assert with_baseline(group(1, 0), group(1, length=12), ALGORITHM).baseline == 0.5
    forked = group(1, 1, conversations=np.array([0, 0]))
    assert with_baseline(group(1, 0), forked, ALGORITHM).baseline == 1
    with pytest.raises(ValueError, match="prompt 3: .* for one greedy sample, and made 2"):
        with_baseline(group(1, 0), group(1, 1), ALGORITHM)


def test_where_it_does_not_apply_the_group_has_no_reward_and_has_not_failed():
    found = with_baseline(group(1, NAN, 0), group(NAN), ALGORITHM)
    assert found.baseline is None and np.isnan(found.rewards).all() and not found.failures


def test_where_it_has_failed_each_conversation_has_that_had_not():
    """The first conversation is two samples, the second has failed by itself."""
    given = group(1, 1, NAN, 0, failures=("", "", "gone"), conversations=np.array([0, 0, 1, 2]))
    found = with_baseline(given, group(NAN, failures=("boom",)), ALGORITHM)
    why = "its greedy sample, boom"
    assert found.failures == ["gone", why, why] and np.isnan(found.rewards).all()
    assert found.details.reasons == {0: why, 1: why, 2: "gone", 3: why}
    assert given.rewards[0] == 1 and given.failures == ["gone"]


def test_when_its_engine_dies_nobody_waits_for_the_group():
    ended = []

    async def for_ever() -> Group:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    async def dies() -> Group:
        await asyncio.sleep(0)
        raise EngineDied("it is gone")

    with pytest.raises(EngineDied):
        asyncio.run(beside(for_ever(), dies(), ALGORITHM))
    assert ended
