"""One more sample of a prompt, of the likeliest tokens, by the same environment under the same
adapter version: it is scored and not trained on, and its reward is the baseline of the others."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from lora_moe_rl.algorithms.base import Algorithm
from lora_moe_rl.data.samples import Group
from lora_moe_rl.environments.parts.conversation import together
from lora_moe_rl.ports import Manner

GREEDY = Manner(temperature=0.0)

Rolling = Coroutine[Any, Any, Group]


async def beside(rolling: Rolling, greedy: Rolling, algorithm: Algorithm) -> Group:
    """The group that is rolled, with the reward of a group of one that is rolled at the same time.
    When one of them raises, the other is ended."""
    return with_baseline(*await together([rolling, greedy]), algorithm)


def with_baseline(group: Group, greedy: Group, algorithm: Algorithm) -> Group:
    """The group with what counts of the reward of `greedy`, a group of one. Where that has none no
    sample of the group has a reward; where it has failed, those of the group have. Raises
    ValueError for a greedy group of several."""
    if len(greedy.ends) != 1:
        raise ValueError(
            f"prompt {group.prompt.number}: the environment was asked for one greedy sample, and "
            f"made {len(greedy.ends)}: an environment makes as many as its group_size says"
        )
    baseline = float(algorithm.rewards(greedy)[-1])
    if not np.isnan(baseline):
        return replace(group, baseline=baseline)
    lost = np.flatnonzero(~np.isnan(group.rewards)).tolist()
    group = replace(group, rewards=np.full_like(group.rewards, np.nan))
    if not greedy.failures:
        return group
    why = f"its greedy sample, {greedy.failures[0]}"
    reasons = group.details.reasons | dict.fromkeys(lost, why)
    failures = [*group.failures, *(why for end in group.ends.tolist() if end in lost)]
    return replace(group, failures=failures, details=replace(group.details, reasons=reasons))
