"""From the logprobs of held-out rows' own answers to the metrics of their set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_moe_rl.algorithms.base import Algorithm, Known
from lora_moe_rl.config import EvalSetConfig
from lora_moe_rl.data.samples import Group
from lora_moe_rl.evaluation.scoring import by_value


@dataclass(frozen=True)
class Judged:
    """A row's answers, and logprobs of their tokens, float64 [R] each: of the policy, and of what
    it is measured against (None where it is against nothing)."""

    group: Group
    policy: list[np.ndarray]
    reference: list[np.ndarray] | None


def set_metrics(
    name: str, settings: EvalSetConfig, algorithm: Algorithm, rows: Sequence[Judged]
) -> dict[str, float]:
    """All metrics of an eval set of an algorithm that learns from answers, by their names in
    metrics.jsonl."""

    def about(rows: Sequence[Judged], whole: bool) -> dict[str, float]:
        samples = [sample for row in rows for sample in row.group.samples]
        lengths = sum(len(sample.response_ids) for sample in samples) / len(samples)
        found = algorithm.held_out(known_of(rows))
        return found | {"prompts": len(rows), "response_length": lengths}

    return by_value(name, settings, rows, lambda row: row.group.prompt.columns, about)


def known_of(rows: Sequence[Judged]) -> Known:
    """What an algorithm is shown of these rows, as of a step's."""
    samples = [sample for row in rows for sample in row.group.samples]
    sizes = [len(row.group.samples) for row in rows]
    reference = None
    if rows[0].reference is not None:
        reference = [one for row in rows for one in row.reference or ()]
    return Known(
        np.concatenate([row.group.rewards for row in rows]).astype(np.float64),
        np.repeat(np.arange(len(rows)), sizes),
        [sample.mask for sample in samples],
        [one for row in rows for one in row.policy],
        reference,
    )
