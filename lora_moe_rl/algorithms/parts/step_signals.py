"""What an algorithm says of the groups of a step, made fit to be trained on: checked, without the
samples that are left out, spread over conversations that became several samples, drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lora_moe_rl.algorithms.base import Algorithm, Signal
from lora_moe_rl.algorithms.parts.reweight import draw
from lora_moe_rl.data.samples import Group
from lora_moe_rl.errors import ConfigError


def signals_of(
    algorithm: Algorithm, groups: Sequence[Group], draws: np.random.Generator | None = None
) -> list[Signal]:
    """What `algorithm` says of the groups of a step, without samples that have no reward (a failure
    is not a reward) and, if `algorithm.mask_truncated` is set, without those that were cut off.
    With `algorithm.reweight` those that stay are drawn once more, by `draws`.

    Tokens that the policy did not write have advantage and weight 0, whatever it says of them. A
    conversation of several samples is shown to it as the last of them in which the policy wrote
    something (`Group.shown_for` has all), and all get its advantage.
    """
    shown = [_conversations(algorithm, group) for group in groups]
    signals = algorithm.signals(shown)
    if len(signals) != len(groups):
        name = type(algorithm).__name__
        raise ValueError(f"{name}.signals returned {len(signals)} signals for {len(groups)} groups")
    for group, signal in zip(shown, signals, strict=True):
        _check_shapes(algorithm, group, signal)
    found = [
        _without_left_out(algorithm, group, _spread(algorithm, group, signal))
        for group, signal in zip(groups, signals, strict=True)
    ]
    if algorithm.settings.reweight is None:
        return found
    if draws is None:
        raise ValueError("algorithm.reweight draws samples, and there is nothing to draw them by")
    copies = _drawn(algorithm, shown, draws)
    every = zip(groups, found, copies, strict=True)
    return [_standing(group, signal, own) for group, signal, own in every]


def revised(signals: list[Signal], advantages: Sequence[np.ndarray] | None) -> list[Signal]:
    """The signals of a step with `advantages`, [R] of each sample, in the place of their own (None:
    as they are)."""
    if advantages is None:
        return signals
    given = iter(advantages)
    return [replace(signal, advantages=[next(given) for _ in signal.weights]) for signal in signals]


def _conversations(algorithm: Algorithm, group: Group) -> Group:
    """The group with one sample for each conversation."""
    ends = group.ends
    if len(ends) == len(group.samples):
        return group
    if algorithm.revises:
        raise ConfigError(
            f"prompt {group.prompt.number}: a conversation became several samples (a fork), and "
            f"algorithm={algorithm.settings.name} revises its advantages by sample (for a critic, "
            "or algorithm.kl_in=reward): use one without, as grpo with algorithm.kl_in=loss"
        )
    shown = _shown(group)
    every = np.split(np.arange(len(group.samples)), ends[:-1] + 1)
    return replace(
        group,
        shown_for=[[group.samples[i] for i in own] for own in every],
        samples=[group.samples[i] for i in shown],
        rewards=group.rewards[ends],
        details=group.details.at(ends),
        conversations=None,
        teacher=None if group.teacher is None else [group.teacher[i] for i in shown],
    )


def _shown(group: Group) -> list[int]:
    """The sample by which an algorithm judges each conversation: the last with a token of the
    policy, or the last where none has one."""
    found = group.ends.tolist()
    for i, (sample, place) in enumerate(zip(group.samples, group.conversation_of, strict=True)):
        if sample.mask.any() and not group.samples[found[place]].mask.any():
            found[place] = i
    return found


def _spread(algorithm: Algorithm, group: Group, signal: Signal) -> Signal:
    """The signal of the sample that stands for each conversation, for all its samples. Raises
    ConfigError when that is not one number."""
    if len(signal.weights) == len(group.samples):
        return signal
    places, shown = group.conversation_of, _shown(group)
    advantages, weights = [], []
    for i, (sample, place) in enumerate(zip(group.samples, places, strict=True)):
        advantage, weight = signal.advantages[place], signal.weights[place]
        if i != shown[place]:
            mask = group.samples[shown[place]].mask
            pairs = {*zip(advantage[mask].tolist(), weight[mask].tolist(), strict=True)}
            if len(pairs) > 1:
                raise ConfigError(
                    f"prompt {group.prompt.number}: a conversation became several samples (a "
                    f"fork), and algorithm={algorithm.settings.name} gives its tokens advantages "
                    "of their own: use one that gives a sample one advantage (grpo, dapo, …), or "
                    "say in it takes_forks = False"
                )
            one, factor = pairs.pop() if pairs else (0.0, 0.0)
            advantage = np.full(len(sample.mask), one, np.float32)
            weight = factor * sample.mask.astype(np.float32)
        advantages.append(advantage)
        weights.append(weight)
    return Signal(advantages, weights, signal.rewards)


def _left_out(algorithm: Algorithm, group: Group) -> np.ndarray:
    """bool [n], True for samples that are not in the loss. A conversation whose end was cut off
    leaves with all its samples, as one that is a single sample does."""
    left_out = np.isnan(group.rewards)
    if algorithm.settings.mask_truncated:
        cut_off = np.array([sample.truncated for sample in group.samples])
        left_out = left_out | cut_off | cut_off[group.ends][group.conversation_of]
    return left_out


def _drawn(
    algorithm: Algorithm, shown: Sequence[Group], draws: np.random.Generator
) -> list[np.ndarray]:
    """How many times each conversation of each group was drawn, of those in the loss."""
    rewards = [
        np.where(_left_out(algorithm, group), np.nan, algorithm.rewards(group)) for group in shown
    ]
    settings = algorithm.settings
    assert settings.reweight is not None
    copies = draw(np.concatenate(rewards), settings.reweight, settings.reweight_power, draws)
    return np.split(copies, np.cumsum([len(own) for own in rewards])[:-1])


def _standing(group: Group, signal: Signal, copies: np.ndarray) -> Signal:
    """The signal of samples that stand in the loss as often as their conversation was drawn."""
    copies = copies[group.conversation_of]
    pairs = zip(signal.weights, copies, strict=True)
    weights = [weight if times else np.zeros_like(weight) for weight, times in pairs]
    return replace(signal, weights=weights, copies=copies)


def _without_left_out(algorithm: Algorithm, group: Group, signal: Signal) -> Signal:
    left_out = _left_out(algorithm, group)
    masks = [sample.mask for sample in group.samples]
    weights = [
        np.where(mask & ~out, weight, 0).astype(np.float32)
        for weight, mask, out in zip(signal.weights, masks, left_out, strict=True)
    ]
    advantages = [
        np.where(mask, advantage, 0).astype(np.float32)
        for advantage, mask in zip(signal.advantages, masks, strict=True)
    ]
    return replace(signal, advantages=advantages, weights=weights)


def _check_shapes(algorithm: Algorithm, group: Group, signal: Signal) -> None:
    wanted = [sample.mask.shape for sample in group.samples]
    for name in ("advantages", "weights"):
        arrays: Sequence[np.ndarray] = getattr(signal, name)
        if (found := [array.shape for array in arrays]) != wanted:
            raise ValueError(
                f"{type(algorithm).__name__}.signal returned {name} of shapes {found} for samples "
                f"of {wanted} tokens"
            )
