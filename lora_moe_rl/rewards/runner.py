"""Calls the user's reward function for each group as it finishes, in processes that may be lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lora_moe_rl.calls.pool import NoWorker, Pool, WorkerLost
from lora_moe_rl.config import RewardFunction
from lora_moe_rl.data.samples import Prompt, Sample
from lora_moe_rl.data.scores import Details, Played, Scores
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.calling import Outcome
from lora_moe_rl.rewards.turns import fault_of

MOST_ARGS = 120_000  # bytes: Linux hands a new process no word of 128 KiB
EACH = ("completions", "completion_ids", "played")  # of a call's arguments: one for each sample


@dataclass(frozen=True)
class Answer:
    """What a worker answers for one prompt: `outcome`, and what the function has logged."""

    outcome: Outcome
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    turns: list[list[float] | None] = field(default_factory=list)


class RewardRunner:
    """Rewards of groups, as they come. Use it as a context manager, or call `close`.

    A prompt's samples are scored by one call. A call that raises, takes longer than `timeout_s`,
    ends the process or returns anything but one finite number (or None) for each sample has failed:
    its samples get NaN, never 0, and a line in the failures. Where a plain function scores each
    sample by itself, and so says, samples whose call was ended are scored again one by one, so
    that only those fail that are to blame.

    `max_steps`: optimizer steps of the run, which functions are told. `workers`: processes of a
    plain function. Raises ConfigError when the function cannot be imported, or does not take its
    arguments.
    """

    def __init__(self, reward: RewardFunction, timeout_s: float, max_steps: int, workers: int):
        assert reward.function is not None
        self.reward, self.timeout_s, self.max_steps = reward, timeout_s, max_steps
        self.function = reward.function
        module, setting = "lora_moe_rl.rewards.worker", "reward.timeout_s"
        args = json.dumps(reward.args)
        if len(args) > MOST_ARGS:
            raise ConfigError(
                f"{reward.key}={self.function}: its args are {len(args):,} bytes, and a process is "
                f"given {MOST_ARGS:,} at most; put what is long into a file, and give its path"
            )
        words = [self.function, args]
        try:
            self.pool = Pool(module, words, workers, timeout_s, setting)
        except (WorkerLost, ConfigError) as error:
            raise ConfigError(f"{reward.key}={self.function}: {error}") from error
        told = self.pool.workers[0].told
        self.is_async = told["async"]  # all calls at the same time, in one process
        self.by_sample = told["by_sample"] and not self.is_async

    async def score(
        self, prompt: Prompt, samples: Sequence[Sample], played: Sequence[Played] = ()
    ) -> Scores:
        """Rewards of a prompt's samples, float32 [n], and one line for each sample that failed.

        NaN stands for a failure and for None ("does not apply"), which is no failure.
        """
        if not len(samples):  # all conversations have failed: there is nothing to call it with
            return Scores(np.empty(0, np.float32), [], Details())
        answer = await self._answer(self._arguments(prompt, samples, played))
        rewards = np.full(len(samples), np.nan, dtype=np.float32)
        reasons: dict[int, str] = {}
        told = dict(enumerate(answer.turns))
        for index, value in enumerate(answer.outcome):
            if isinstance(value, float) and (turns := told.get(index)) is not None:
                fault = fault_of(turns, len(samples[index].turn_ends), value)
                value = f"{fault} (log_turn_rewards)" if fault else value
            if isinstance(value, str):
                reasons[index] = f"prompt {prompt.number}: {self.function} {value}"
            elif value is not None:
                rewards[index] = value
        given = {i: one for i, one in told.items() if one is not None}
        by_turn = {i: one for i, one in given.items() if not np.isnan(rewards[i])}
        details = Details({}, reasons, answer.extra, answer.metrics, by_turn)
        return Scores(rewards, list(reasons.values()), details)

    async def _answer(self, arguments: dict[str, Any]) -> Answer:
        """What the worker says of a prompt's samples, or why it is lost."""
        number = len(arguments["completions"])
        try:
            return Answer(**await self.pool.call(arguments))
        except WorkerLost as error:
            if number == 1 or not self.by_sample or isinstance(error, NoWorker):
                return Answer([str(error)] * number)
        alone = [
            arguments | {name: arguments[name][i : i + 1] for name in EACH} for i in range(number)
        ]
        return _together(await asyncio.gather(*map(self._answer, alone)))

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _arguments(
        self, prompt: Prompt, samples: Sequence[Sample], played: Sequence[Played]
    ) -> dict[str, Any]:
        """What a worker needs to call the function for one prompt."""
        texts: list[Any] = [sample.text for sample in samples]
        if not isinstance(prompt.text, str):
            texts = [
                list(sample.messages) or [{"role": "assistant", "content": sample.text}]
                for sample in samples
            ]
        versions = [int(version) for sample in samples for version in sample.versions]
        return {
            "prompt": prompt.text,
            "completions": texts,
            "completion_ids": [sample.response_ids.tolist() for sample in samples],
            "columns": prompt.columns,
            "played": list(played),
            # Each optimizer step makes an adapter version.
            "trainer_state": {
                "global_step": max(versions, default=0),
                "max_steps": self.max_steps,
            },
        }


def _together(answers: Sequence[Answer]) -> Answer:
    """Answers for a sample each as one for all of them."""
    columns = dict.fromkeys(name for one in answers for name in one.extra)
    names = dict.fromkeys(name for one in answers for name in one.metrics)
    return Answer(
        [one.outcome[0] for one in answers],
        {name: [one.extra.get(name, [None])[0] for one in answers] for name in columns},
        {name: [n for one in answers for n in one.metrics.get(name, [])] for name in names},
        [one.turns[0] if one.turns else None for one in answers],
    )
