"""What stands at the loop's ports when an algorithm learns from the rows' own answers: a prompt's
group is what its row holds, no engine is asked, and a version that is trained goes to nobody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.data.samples import Answer, Group, Prompt, Sample, Segment
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.ports import Answers, Manner, Policy, Ref, Turn, Watch


class RowAnswers(Environment):
    """The environment: every answer of the row is a sample, the best first, with rewards that say
    only that."""

    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        samples = [_sample(prompt, answer) for answer in prompt.answers]
        rewards = np.arange(len(samples), 0, -1, dtype=np.float32) - 1
        return Group(prompt, samples, None, rewards)


def _sample(prompt: Prompt, answer: Answer) -> Sample:
    segments = Segment.given("user", prompt.token_ids), Segment.wanted(answer.token_ids)
    return Sample(segments, "stop", answer.text)


class NoPolicy:
    """What a ticket gets in the place of a policy."""

    async def sample(
        self, token_ids: Sequence[int], n: int, turn: Turn | None = None
    ) -> tuple[list[Sample], Ref]:
        raise AssertionError("nothing is sampled where the rows' answers are learned from")

    def join(self, samples: Sequence[Sequence[Ref]]) -> Ref:
        raise AssertionError("there are no routes where the rows' answers are learned from")

    def beside(self, version: int | None, manner: Manner) -> Answers:
        raise AssertionError("nothing is sampled where the rows' answers are learned from")

    def held_up(self) -> float:
        return 0.0


class NoEngines:
    """Nobody samples."""

    restarts = 0

    def policy(self, version: int, seed: int, watch: Watch, manner: Manner | None = None) -> Policy:
        return NoPolicy()

    async def pin(self, version: int | None) -> None:
        raise AssertionError("nothing is evaluated where the rows' answers are learned from")

    def lost(self, version: int) -> bool:
        raise AssertionError("nothing is served where the rows' answers are learned from")

    async def all_back(self) -> None:
        """There is none to wait for."""

    def overwrite(self) -> None:
        """There is none that could still read what is written over."""

    async def give_way(self) -> None:
        """There is none that holds anything."""


class Unserved:
    """The publisher: the version that was trained last is the one that the next step updates."""

    def __init__(self, first_version: int):
        self.version = first_version

    async def start(self) -> None:
        """There is nothing to serve."""

    async def publish(
        self, version: int, parts: Sequence[Ref], samples: Sequence[Sample]
    ) -> dict[str, float]:
        assert not parts, "parts were sent, and there is no engine to take them"
        self.version = version
        return {}
