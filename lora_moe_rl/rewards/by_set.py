"""The rewards of all data sets: which functions score a prompt follows from the set it is of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from lora_moe_rl.config import RewardConfig, RewardFunction
from lora_moe_rl.config.section import is_set
from lora_moe_rl.data.samples import Prompt, Sample
from lora_moe_rl.data.scores import Details, Played, Scores
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.combining import combine
from lora_moe_rl.rewards.runner import RewardRunner


class RewardsBySet:
    """Runners, one for each function with its arguments. Use it as a context manager, or call
    `close`.

    `functions`: by the name of the set ('': the only one). `max_steps`: optimizer steps of the run.
    `settings`: the section `reward`. Raises ConfigError when one cannot be imported, or for
    reward.workers where none has them.
    """

    def __init__(
        self,
        functions: Mapping[str, Sequence[RewardFunction]],
        settings: RewardConfig,
        max_steps: int,
    ):
        timeout_s, workers = settings.timeout_s, settings.workers
        self._functions = dict(functions)
        self._runners: dict[str, RewardRunner] = {}
        with ExitStack() as started:
            for one in (one for several in functions.values() for one in several):
                if (which := _identity(one)) not in self._runners:
                    runner = RewardRunner(one, timeout_s, max_steps, workers)
                    self._runners[which] = started.enter_context(runner)
            if is_set(settings, "workers") and all(one.is_async for one in self._runners.values()):
                raise ConfigError(
                    f"reward.workers={workers} has no effect with {self._every_function()}: an "
                    "async one has one process, for all prompts at the same time; leave it out"
                )
            self._close = started.pop_all().close

    def _every_function(self) -> str:
        return " and ".join(f"{one.reward.key}={one.function}" for one in self._runners.values())

    def of(self, name: str) -> list[RewardRunner]:
        """The runners of a set."""
        return [self._runners[_identity(one)] for one in self._functions[name]]

    async def score(
        self, prompt: Prompt, samples: Sequence[Sample], played: Sequence[Played] = ()
    ) -> Scores:
        """Rewards of a prompt's samples by the functions of its set, which are called at the same
        time: as RewardRunner gives them, or of several functions `combine`d."""
        runners = self.of(prompt.data_set)
        scores = await asyncio.gather(*(one.score(prompt, samples, played) for one in runners))
        functions = self._functions[prompt.data_set]
        return combine(functions, scores) if functions[0].name else scores[0]

    def close(self) -> None:
        self._close()

    def __enter__(self) -> RewardsBySet:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class NoRewards:
    """The rewards of a run without a reward function: no sample has a reward, and none has
    failed."""

    async def score(
        self, prompt: Prompt, samples: Sequence[Sample], played: Sequence[Played] = ()
    ) -> Scores:
        return Scores(np.full(len(samples), np.nan, np.float32), [], Details())

    def close(self) -> None: ...


def _identity(one: RewardFunction) -> str:
    """Equal for functions that give the same."""
    return json.dumps([one.function, one.args], sort_keys=True)
