"""What of a sample's reward was earned before its end: at the ends of turns, where a reward
function (`log_turn_rewards`) or the environment tells it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.data.samples import Group


def earned_before_the_end(group: Group) -> list[np.ndarray] | None:
    """float64 [R] of each sample: the reward of each turn but the last at that turn's last token.
    The rest of the sample's reward is earned at its end. None where nothing is told of turns."""
    if not group.details.by_turn:
        return None
    found = [np.zeros(len(sample.mask)) for sample in group.samples]
    for index, rewards in group.details.by_turn.items():
        sample = group.samples[index]
        places = np.flatnonzero(sample.mask)
        if not len(places):
            continue
        for end, reward in zip(sample.turn_ends[:-1], rewards[:-1], strict=True):
            # A turn that was left out of the loss has no token for it: that of the one before.
            at = max(int(np.searchsorted(places, end, side="right")) - 1, 0)
            found[index][places[at]] += reward
    return found


def of_all(groups: Sequence[Group]) -> list[np.ndarray] | None:
    """The same of the samples of several groups."""
    each = [earned_before_the_end(group) for group in groups]
    if all(one is None for one in each):
        return None
    pairs = zip(groups, each, strict=True)
    return [
        array
        for group, one in pairs
        for array in one or [np.zeros(len(sample.mask)) for sample in group.samples]
    ]
