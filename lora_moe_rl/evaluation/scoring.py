"""From the groups of an eval set to its metrics, and to the lines that are kept of its samples."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lora_moe_rl.config import EvalSetConfig
from lora_moe_rl.data.samples import Group
from lora_moe_rl.errors import DataError
from lora_moe_rl.evaluation.answers import answer_of
from lora_moe_rl.evaluation.estimators import majority, mean_and_interval, pass_at_k
from lora_moe_rl.telemetry import names

MAX_VALUES = 50  # of a column that metrics are told by
_NOT_IN_A_NAME = re.compile(r"[^\w.+-]")  # trackers take letters of all scripts


def set_metrics(name: str, settings: EvalSetConfig, groups: Sequence[Group]) -> dict[str, float]:
    """All metrics of an eval set, by their names in metrics.jsonl."""
    about = partial(_about, settings)
    return by_value(name, settings, groups, lambda group: group.prompt.columns, about)


def by_value[Row](
    name: str,
    settings: EvalSetConfig,
    rows: Sequence[Row],
    columns: Callable[[Row], dict[str, Any]],
    about: Callable[[Sequence[Row], bool], dict[str, float]],
) -> dict[str, float]:
    """What is told `about` all rows of a set, and with `group_by` about those of each value of that
    column; `columns` are those of a row. `about(rows, True)` is of the whole set."""
    found = {names.of_eval(name, what): value for what, value in about(rows, True).items()}
    if settings.group_by is None:
        return found
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(name_of(columns(row)[settings.group_by]), []).append(row)
    for value in sorted(parts):
        place = f"{name}/{settings.group_by}={value}"
        own = about(parts[value], False)
        found |= {names.of_eval(place, what): number for what, number in own.items()}
    return found


def _about(settings: EvalSetConfig, groups: Sequence[Group], intervals: bool) -> dict[str, float]:
    """Each metric is a mean over prompts, so that all prompts count the same."""
    columns: dict[str, list[float]] = {"avg": [_mean(_rewards(group)) for group in groups]}
    for k in settings.ks:
        columns[f"pass@{k}"] = [_pass(settings, group, k) for group in groups]
    if settings.answer is not None:
        votes = [_majority(settings, settings.answer, group) for group in groups]
        columns[f"maj@{settings.samples}"] = votes
    found: dict[str, float] = {}
    for what, values in columns.items():
        found[what], half_width = mean_and_interval(values)
        if intervals:
            found[f"{what}_ci95"] = half_width
    samples = [group.samples[end] for group in groups for end in group.ends]
    failed = sum(len(group.failures) for group in groups)
    without = sum(int(np.isnan(_rewards(group)).sum()) for group in groups)
    return found | {
        "prompts": len(groups),
        "failed": failed,
        "none": without - failed,
        "response_length": sum(len(one.response_ids) for one in samples) / len(samples),
        "truncated": sum(one.truncated for one in samples) / len(samples),
    }


def sample_lines(name: str, settings: EvalSetConfig, groups: Sequence[Group]) -> list[dict]:
    """A line for each sample; of several of one conversation, for the last."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        for number, end in enumerate(group.ends):
            sample = group.samples[end]
            line = {
                "set": name,
                "row": group.prompt.number,
                "sample": number,
                "prompt": group.asked(end),
                "response": sample.text,
                "reward": float(group.rewards[end]),
                "right": bool(_right(settings, group.rewards[end])),
                "finish_reason": sample.finish_reason,
                "tokens": len(sample.response_ids),
                "token_ids": sample.response_ids.tolist(),
            }
            if settings.answer is not None:
                answer = answer_of(settings.answer, sample.text)
                line["answer"] = None if answer is None else str(answer)
            if settings.group_by is not None:
                value = group.prompt.columns[settings.group_by]
                line["group"] = value if isinstance(value, str | int | float) else str(value)
            if sample.messages:
                line["messages"] = sample.messages
            if (reason := group.details.reasons.get(int(end))) is not None:
                line["failure"] = reason
            lines.append(line)
    return lines


def check_values(settings: EvalSetConfig, columns: Mapping[int, dict[str, Any]]) -> None:
    """Raises DataError when eval.sets.NAME.group_by cannot group these rows, by their numbers."""
    if (column := settings.group_by) is None:
        return
    setting = f"{settings.key('group_by')}={column}"
    for row, values in columns.items():
        if values.get(column) is None:
            have = ", ".join(sorted(values)) or "none"
            raise DataError(f"{setting}: row {row} has no such column; it has {have}")
    distinct = {str(values[column]) for values in columns.values()}
    if len(distinct) > MAX_VALUES:
        raise DataError(
            f"{setting} has {len(distinct)} values, and each would have metrics of its own; at "
            f"most {MAX_VALUES} are told"
        )
    named: dict[str, str] = {}
    for value in sorted(distinct):
        if (other := named.setdefault(name_of(value), value)) != value:
            raise DataError(
                f"{setting}: {other!r} and {value!r} would have the same metrics, of the name "
                f"{name_of(value)}: a name keeps letters, digits, _, ., + and - of a value. Write "
                "one of them otherwise in the data, or group by a column of short names"
            )


def name_of(value: Any) -> str:
    """A column's value as a part of a metric's name."""
    return _NOT_IN_A_NAME.sub("_", str(value))


def _rewards(group: Group) -> np.ndarray:
    """float32 [n], one a conversation, NaN for none."""
    return group.rewards[group.ends]


def _mean(rewards: np.ndarray) -> float:
    given = rewards[~np.isnan(rewards)].astype(np.float64)
    return float(given.mean()) if len(given) else math.nan


def _right(settings: EvalSetConfig, rewards: np.ndarray | np.float32) -> np.ndarray:
    """bool, shaped as `rewards`, float32: the bound too is taken in float32, in which a reward of
    0.9 is no less than 0.9."""
    return np.asarray(rewards >= np.float32(settings.right_at))


def _pass(settings: EvalSetConfig, group: Group, k: int) -> float:
    """pass@k of the samples that have a reward."""
    given = _rewards(group)
    given = given[~np.isnan(given)]
    return pass_at_k(len(given), int(_right(settings, given).sum()), k)


def _majority(settings: EvalSetConfig, how: str, group: Group) -> float:
    """The majority's reward of the samples that have one; NaN when none has."""
    ends = [end for end in group.ends if not np.isnan(group.rewards[end])]
    if not ends:
        return math.nan
    answers = [answer_of(how, group.samples[end].text) for end in ends]
    return majority(answers, _right(settings, group.rewards[ends]).tolist())
