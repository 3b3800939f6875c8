"""The reward, called once before anything slow starts, on made-up completions of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_moe_rl.config import SourceConfig
from lora_moe_rl.data.columns import ANSWER_COLUMNS, Row, read_row, value_in
from lora_moe_rl.data.samples import Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.builtin import answer_text
from lora_moe_rl.rewards.calling import SAMPLES
from lora_moe_rl.rewards.runner import RewardRunner

PATIENCE_S = 5.0
SHOWN = 60  # characters of a completion
MADE_UP = ("", "I do not know.")


@dataclass(frozen=True)
class Trial:
    """`text`: what the function gave, as a sentence."""

    text: str
    warnings: list[str]


def call(rewards: RewardRunner, row: Row, config: SourceConfig, max_failed: float) -> Trial:
    """Calls the function, in the workers that the run uses, on the answer itself (if the row has
    one) and texts that are none. One that takes longer than PATIENCE_S is ended and only warned of:
    a run may wait reward.timeout_s for it. `config` is of the data set that the row is of.

    Raises ConfigError when all of them fail, or more than `max_failed`, a share, allows; and what
    `read_row` raises.
    """
    text, columns = read_row(row, config)
    answer = columns.get("answer")
    right = _text(answer)
    completions = [*([] if right is None else [right]), *MADE_UP]
    samples = [_sample(completion) for completion in completions]
    prompt = Prompt(0, text, [0], columns)
    try:
        values, failures, _ = asyncio.run(_score(rewards, prompt, samples))
    except TimeoutError:
        rewards.close()
        late = (
            f"{rewards.function} took longer than {PATIENCE_S:g} s for {len(samples)} made-up "
            f"completions; a run waits up to reward.timeout_s={rewards.timeout_s:g} s a prompt"
        )
        return Trial(late, [late])
    if len(failures) > max_failed * len(samples) or len(failures) == len(samples):
        raise ConfigError(
            f"{rewards.reward.key}={rewards.function} fails on made-up completions of the first "
            f"prompt ({row[0]}): {failures[0].partition(rewards.function)[2].strip()}"
        )
    given = ", ".join(
        f"{_number(value)} for {_shown(completion, completion == right)}"
        for value, completion in zip(values, completions, strict=True)
    )
    warnings = [
        f"no reward function sees the column {name!r} of the rows: under that name it gets what a "
        "run gives it; rename the column"
        for name in columns
        if name in SAMPLES
    ]
    if failures:
        warnings.append(f"{len(failures)} of {len(samples)} rewards failed: {failures[0]}")
    elif len(set(map(str, values))) == 1 and answer is not None:
        warnings.append(f"the reward tells the answer from nothing else: it gave {given}")
    return Trial(f"{rewards.function} gave {given}", warnings)


def without_answers(rows: Sequence[Row], config: SourceConfig) -> str:
    """A warning of rows of a data set that have no answer where others have one, or where the
    column is there; '' for none."""
    key = config.answer_key
    columns = ANSWER_COLUMNS if key is None else (key,)
    without = [
        place
        for place, values in rows
        if isinstance(values, dict) and all(value_in(values, one) is None for one in columns)
    ]
    named = any(one in values for _, values in rows if isinstance(values, dict) for one in columns)
    if not without or (len(without) == len(rows) and not named):
        return ""
    return (
        f"{len(without):,} of {len(rows):,} rows have no answer ({without[0]} is the first): the "
        "reward is given None in its place"
    )


def _text(answer: Any) -> str | None:
    try:
        return answer_text(answer)
    except TypeError:  # what a function of one's own may make of it
        return str(answer)


async def _score(rewards: RewardRunner, prompt: Prompt, samples: list[Sample]) -> Any:
    return await asyncio.wait_for(rewards.score(prompt, samples), PATIENCE_S)


def _sample(text: str) -> Sample:
    """Token ids that stand for nothing, one a character: the tokenizer is not loaded yet."""
    ids = [ord(character) % 128 for character in text]
    given = Segment.sampled(ids, np.zeros(len(ids), dtype=np.float32), 0)
    return Sample((Segment.given("user", [0]), given), "stop", text)


def _number(value: float) -> str:
    return "none" if np.isnan(value) else f"{value:g}"


def _shown(completion: str, is_answer: bool) -> str:
    text = repr(completion if len(completion) <= SHOWN else completion[:SHOWN] + "...")
    return f"the answer {text}" if is_answer else text
