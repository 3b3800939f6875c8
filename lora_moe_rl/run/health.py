"""Whether a run can learn from what it samples: what is counted, and when it is said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.algorithms.base import Signal, apart
from lora_moe_rl.data.samples import TOO_LONG, Group
from lora_moe_rl.telemetry import names

SAME_STEPS = 5  # steps in a row whose rewards are all one number
MOST_TRUNCATED = 0.5
REPEAT_STEPS = 20  # from one warning to the next of its kind


def group_metrics(groups: Sequence[Group], within: float = 0.0) -> dict[str, float]:
    """Shares of the step's groups whose samples all have one same reward, or rewards no further
    apart than `within`, which tells them from nothing: above 0 (`solved_all`), or 0 and less
    (`solved_none`)."""
    given = [values for group in groups if len(values := _given(group))]
    one = [values.min() for values in given if not apart(values, within)]
    solved = sum(value > 0 for value in one)
    return {
        names.SOLVED_ALL: solved / len(groups),
        names.SOLVED_NONE: (len(one) - solved) / len(groups),
    }


class Health:
    """Looks at a run's steps, one after the other. `within`: see `group_metrics`. `greedy`: whether
    advantages are against a greedy sample of each prompt, and not within a group."""

    def __init__(self, within: float = 0.0, greedy: bool = False):
        self._within, self._greedy, self._same = within, greedy, 0
        self._said: dict[str, int] = {}  # the step of the last warning, by kind
        self._silent: set[tuple[str, bool]] = set()  # reward functions, and whether they failed

    def look(self, step: int, groups: Sequence[Group], signals: Sequence[Signal]) -> list[str]:
        """Warnings of a step, each kind at most once in REPEAT_STEPS, and once that one of several
        reward functions gives nothing."""
        found = {
            "signal": self._no_signal(groups, signals),
            "rewards": self._same_rewards(groups),
            "truncated": self._truncated(groups),
        }
        new = {kind: text for kind, text in found.items() if text and self._is_due(kind, step)}
        self._said |= dict.fromkeys(new, step)
        every = [*new.values(), *self._silent_functions(groups)]
        return [f"step {step}: {text}" for text in every]

    def _is_due(self, kind: str, step: int) -> bool:
        return kind not in self._said or step - self._said[kind] >= REPEAT_STEPS

    def _no_signal(self, groups: Sequence[Group], signals: Sequence[Signal]) -> str:
        if any(_has_signal(signal) for signal in signals):
            return ""
        if self._greedy:
            return (
                "no sample has an advantage, nothing is learned: each has the reward of its "
                "prompt's greedy sample; use prompts that are sometimes solved, or a higher "
                "rollout.temperature"
            )
        shares = group_metrics(groups, self._within)
        words = [word for group in groups for word in group.teacher_read or ()]
        if long := words.count(TOO_LONG):
            return (
                f"the policy could read nothing as its own teacher, nothing is learned: {long} of "
                f"{len(words)} samples had no room for it in model.max_length; raise that"
            )
        return (
            f"no group has an advantage, nothing is learned: of {len(groups)} groups "
            f"{shares[names.SOLVED_ALL]:.0%} have one same reward above 0 for all their samples, "
            f"{shares[names.SOLVED_NONE]:.0%} one of 0 or less; use prompts that are sometimes "
            "solved, or a larger algorithm.group_size"
        )

    def _same_rewards(self, groups: Sequence[Group]) -> str:
        values = np.unique(np.concatenate([_given(group) for group in groups]))
        self._same = self._same + 1 if len(values) == 1 else 0
        if self._same < SAME_STEPS:
            return ""
        return (
            f"every reward was {values[0]:g}, and all were one number in each of the last "
            f"{self._same} steps; `lora-moe-rl check` shows what the reward gives for an answer"
        )

    def _silent_functions(self, groups: Sequence[Group]) -> list[str]:
        """Which of several reward functions gave no sample of the step a reward, each told of once,
        and once more when it failed where it gave None before, or the other way round."""
        found = []
        for name in dict.fromkeys(name for group in groups for name in group.details.by_function):
            own = [(f, g.ends) for g in groups if (f := g.details.by_function.get(name))]
            rewards = np.concatenate([one.rewards[ends] for one, ends in own])
            failures = [one.failure for one, _ in own if one.failure]
            kind = name, bool(failures)
            if kind in self._silent or not np.isnan(rewards).all():
                continue
            self._silent.add(kind)
            failed = sum(one.num_failed for one, _ in own)
            why = f"it failed for {failed}, the last: {failures[-1]}" if failures else "all None"
            found.append(
                f"reward.functions.{name} gave none of {len(rewards)} samples a reward: {why} "
                f"({names.of_function(name, 'failed')} and {names.of_function(name, 'none')} count "
                "on)"
            )
        return found

    def _truncated(self, groups: Sequence[Group]) -> str:
        samples = [sample for group in groups for sample in group.samples]
        share = sum(sample.truncated for sample in samples) / len(samples)
        if share <= MOST_TRUNCATED:
            return ""
        return (
            f"{share:.0%} of the samples were cut off at rollout.max_response_tokens; raise it, or "
            "leave them out of the loss with algorithm.mask_truncated=true"
        )


def _given(group: Group) -> np.ndarray:
    return group.rewards[~np.isnan(group.rewards)]


def _has_signal(signal: Signal) -> bool:
    pairs = zip(signal.advantages, signal.weights, strict=True)
    return any(np.any((advantage != 0) & (weight > 0)) for advantage, weight in pairs)
