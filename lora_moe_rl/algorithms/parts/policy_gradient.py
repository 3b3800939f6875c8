"""What most algorithms are: an advantage, a loss, a correction and a rejection put together.

A preset is a subclass that gives the parts and their settings other defaults. Whatever it does not
say can be said in the config, part by part: `algorithm=grpo algorithm.loss=gspo`. The settings of a
part exist with it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.base import (
    Algorithm,
    Known,
    Loss,
    Pass,
    Reduce,
    Signal,
    Tokens,
    apart,
)
from lora_moe_rl.algorithms.losses.base import ratio_of, selected_of
from lora_moe_rl.algorithms.parts.composing import (
    settings_class,
    settings_of_each,
    split_values,
)
from lora_moe_rl.algorithms.parts.correction_presets import CORRECTION_PRESETS, settings_of
from lora_moe_rl.algorithms.parts.groups import (
    baselines_of,
    each_function,
    of_teacher,
    of_those_taught,
)
from lora_moe_rl.algorithms.parts.kl import estimate
from lora_moe_rl.algorithms.parts.kl_control import KLControl
from lora_moe_rl.algorithms.parts.overlong import soft_punishment
from lora_moe_rl.algorithms.parts.selection import Selection, StepTokens, of_high_entropy
from lora_moe_rl.algorithms.parts.settings import (
    PolicyGradientConfig,
    reads_anchor,
    rejection_names,
)
from lora_moe_rl.algorithms.parts.turns import earned_before_the_end, of_all
from lora_moe_rl.algorithms.rejections.base import kept_by
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.config.plugins import PARTS, choices
from lora_moe_rl.config.teacher import AnyTeacher, SelfTeacherSettings
from lora_moe_rl.data.samples import Group

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.parts.divergence import Divergence
    from lora_moe_rl.algorithms.rejections.base import Rejection


class PolicyGradient(Algorithm):
    """`defaults`: what the preset sets of the parts and their settings."""

    Settings: ClassVar[type[AlgorithmConfig]] = PolicyGradientConfig
    composed: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {}

    settings: PolicyGradientConfig

    def __init__(self, settings: PolicyGradientConfig, max_response_tokens: int):
        super().__init__(settings, max_response_tokens)
        self._advantage = PARTS["advantage"].find(settings.advantage)(settings)
        self._loss = PARTS["loss"].find(settings.loss)(settings)
        self._correction = settings.correction_part(settings)
        self._rejections: list[Rejection] = [
            PARTS["rejection"].find(own.rejection)(own) for own in settings_of_each(settings)
        ]
        rejecting = [one for one in self._rejections if one.rejects]
        at_rollout = settings.anchor == "rollout"
        self._updated = [one for one in rejecting if one.of_updated or at_rollout]
        self._before = [one for one in rejecting if one not in self._updated]
        own: dict[str, Reduce] = {"policy": "token_mean", "kl": "token_mean"}
        if self._updated:
            own["rejected_share"] = "token_mean"
        if self.selects:
            own["selected"] = "token_mean"
        self.metrics = {**own, **self._loss.metrics, **self._correction.metrics}

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> AlgorithmConfig:
        """Settings of the preset and of the parts that `value` chooses. Raises ValueError for those
        of another part, with the part whose they are."""
        value = _named(cls, value)
        chosen = {}
        for kind in PARTS:
            default = cls.defaults.get(kind, cls.Settings.model_fields[kind].default)
            chosen[kind] = value.get(kind, default)
            if not isinstance(chosen[kind], str):
                raise ValueError(f"algorithm.{kind}={chosen[kind]!r} is not a name")
        chosen["correction"] = settings_of(chosen["correction"])["correction"]
        defaults = tuple(_with_effect(cls.defaults, chosen).items())
        settings = settings_class(cls.__name__, cls.Settings, tuple(chosen.items()), defaults)
        for key in value.keys() - settings.model_fields.keys():
            parts = [label for label in choices("algorithm") if "=" in label]
            owners = [label for label in parts if key in choices("algorithm")[label].model_fields]
            if owners:
                kind = owners[0].partition("=")[0]
                raise ValueError(
                    f"algorithm.{key}={value[key]} is no setting of algorithm.{kind}="
                    f"{chosen[kind]}: it is one of {' or '.join(owners)}"
                )
        found = settings.model_validate(split_values(value, rejection_names(chosen["rejection"])))
        assert isinstance(found, PolicyGradientConfig)
        settings_of_each(found)  # raises for what one of several refuses
        return found

    @classmethod
    def corrects(cls, settings: PolicyGradientConfig) -> bool:
        """A rejection alone leaves out what is too far, and weighs nothing."""
        loss = PARTS["loss"].find(settings.loss)
        weighs = settings.anchor == "rollout" and loss.has_ratio
        return settings.correction_part.corrects or weighs or loss.of_any_policy

    @property
    def passes(self) -> frozenset[Pass]:
        wanted: set[Pass] = {"reference"} if self.settings.kl_coef else set()
        if self._kl_in_reward:
            wanted.add("old")
        return frozenset(wanted)

    @property
    def trains_entropy(self) -> bool:
        return self.settings.entropy_coef > 0

    @property
    def divergence(self) -> Divergence | None:
        return self._loss.divergence

    @property
    def teacher(self) -> AnyTeacher | None:
        if not self._advantage.needs_teacher:
            return None
        assert isinstance(self.settings, AnyTeacher)
        return self.settings

    @property
    def needs_reward(self) -> bool:
        teacher = self.teacher
        shows = isinstance(teacher, SelfTeacherSettings) and teacher.success_reward is not None
        return teacher is None or shows or self._advantage.settings.reward_weight > 0

    @property
    def greedy_baseline(self) -> bool:
        return self._advantage.greedy_baseline

    @property
    def _kl_in_reward(self) -> bool:
        return self.settings.kl_coef > 0 and self.settings.kl_in == "reward"

    @property
    def kl_control(self) -> KLControl | None:
        settings = self.settings
        if settings.kl_target is None:
            return None
        samples = settings.prompts_per_step * settings.group_size
        return KLControl(settings.kl_coef, settings.kl_target, settings.kl_horizon, samples)

    def _kl_coef(self, known: Known | Tokens) -> float:
        """That of the step; outside steps, and where it stays as it is, that of the settings."""
        return self.settings.kl_coef if known.kl_coef is None else known.kl_coef

    @property
    def revises(self) -> bool:
        return self._kl_in_reward

    @property
    def takes_forks(self) -> bool:
        return super().takes_forks and not self._advantage.by_token(self.settings)

    @property
    def rejects(self) -> bool:
        return bool(self._before)

    def signals(self, groups: Sequence[Group]) -> list[Signal]:
        sizes = [len(group.samples) for group in groups]
        samples = [sample for group in groups for sample in group.samples]
        rewards = [self.rewards(group) for group in groups]
        by_function = each_function(groups) if self._advantage.separates_rewards else {}
        by_turn = self._advantage.compares_turns
        step = Rewarded(
            np.concatenate(rewards),
            np.repeat(np.arange(len(groups)), sizes),
            [sample.mask for sample in samples],
            by_function=[values for _, values in by_function.values()],
            weights=[weight for weight, _ in by_function.values()],
            teacher=None if self.teacher is None else of_teacher(groups),
            logprobs=[sample.logprobs for sample in samples],
            earlier=of_all(groups),
            turns=[one.turn_of for one in samples] if by_turn else None,
            turn_keys=[self._advantage.turn_keys(one) for one in samples] if by_turn else None,
            baselines=baselines_of(groups) if self.greedy_baseline else None,
            written=np.array(
                [sum(int(s.mask.sum()) for s in own) for group in groups for own in group.stood_for]
            ),
        )
        advantages = iter(self._advantage.of_step(step))
        signals = [
            Signal.of_tokens(group, [next(advantages) for _ in group.samples]) for group in groups
        ]
        if self.divergence is not None:
            pairs = zip(signals, groups, strict=True)
            signals = [of_those_taught(signal, group) for signal, group in pairs]
        if not self.revises:
            return signals
        return [
            replace(one, rewards=own, earlier=earned_before_the_end(group))
            for one, own, group in zip(signals, rewards, groups, strict=True)
        ]

    def has_signal(self, group: Group) -> bool:
        if self.greedy_baseline:
            differences = np.abs(self.rewards(group) - baselines_of([group]))  # NaN for none
            return bool((differences > self.settings.equal_within).any())
        if self._advantage.compares_turns:
            return any(one.any() for one in self.signals([group])[0].advantages)
        if group.taught is not None:
            compared = self._advantage.settings.reward_weight > 0
            return any(group.taught) or (compared and super().has_signal(group))
        if not self._advantage.separates_rewards:
            return super().has_signal(group)
        failed = np.isnan(group.rewards)
        return any(
            apart(np.where(failed, np.nan, values), self.settings.equal_within)
            for _, values in each_function([group]).values()
        )

    def revised(self, step: Known) -> list[np.ndarray]:
        """Advantages of the critic's values, if there is one, and of rewards from which each
        token's KL to the base is taken, if kl_in says so."""
        return self._advantage.of_step(self._rewarded(step))

    def _rewarded(self, step: Known) -> Rewarded:
        penalties = self._penalties(step) if self._kl_in_reward else None
        parts = (step.rewards, step.groups, step.masks, step.values, penalties)
        return Rewarded(*parts, earlier=step.earlier)

    def _penalties(self, step: Known) -> list[np.ndarray]:
        """The KL to the base of each token, weighed with kl_coef: before the update, as in verl
        (use_kl_in_reward) and TRL's RLOO. Raises ValueError without the logprobs."""
        import torch

        if step.old is None or step.reference is None:
            raise ValueError(
                "algorithm.kl_in=reward, but the logprobs before the update are missing"
            )
        return [
            self._kl_coef(step)
            * estimate(
                self.settings.kl_estimate, torch.from_numpy(old), torch.from_numpy(reference)
            ).numpy()
            for old, reference in zip(step.old, step.reference, strict=True)
        ]

    def rewards(self, group: Group) -> np.ndarray:
        """Less the soft punishment of long samples."""
        rewards = super().rewards(group)
        if not self.settings.overlong_buffer:
            return rewards
        lengths = np.array(
            [max(len(sample.response_ids) for sample in own) for own in group.stood_for]
        )
        return rewards + soft_punishment(
            lengths,
            self.max_response_tokens,
            self.settings.overlong_buffer,
            self.settings.overlong_penalty,
        )

    def keep(self, tokens: Tokens) -> Tensor:
        return kept_by(self._before, (tokens.old - tokens.rollout).detach(), tokens)

    @property
    def selects(self) -> bool:
        return self._loss.selects or self.selects_by_entropy

    @property
    def selects_by_entropy(self) -> bool:
        return self.settings.top_entropy_quantile < 1

    def select(self, tokens: StepTokens) -> Selection:
        if self.selects_by_entropy:
            return of_high_entropy(tokens, self.settings.top_entropy_quantile)
        at_rollout = self.settings.anchor == "rollout"
        return self._loss.select(replace(tokens, old=tokens.rollout) if at_rollout else tokens)

    @property
    def averages(self) -> bool:
        return self._correction.normalizes

    def averaged(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return self._correction.averaged((tokens.old - tokens.rollout).detach(), tokens)

    def loss(self, tokens: Tokens) -> Loss:
        settings = self.settings
        at_rollout = settings.anchor == "rollout"
        anchored = replace(tokens, old=tokens.rollout) if at_rollout else tokens
        policy, metrics = self._loss.values(anchored)
        if self._correction.corrects:
            trainer = tokens.logprobs.detach() if at_rollout else tokens.old
            weights, of_weights = self._correction.weights(trainer - tokens.rollout, tokens)
            policy, metrics = policy * weights, metrics | of_weights
        if self._updated:
            log_ratio = (tokens.logprobs - tokens.rollout).detach()
            stay = kept_by(self._updated, log_ratio, tokens)
            policy = policy.where(stay, 0.0)
            metrics = metrics | {"rejected_share": (~stay).to(policy.dtype)}
        if self.selects:
            metrics = metrics | {"selected": selected_of(tokens)}
        if self.selects_by_entropy:
            policy = policy * selected_of(tokens)
        kl = self._kl(tokens)
        if kl is not None and settings.kl_weighted:
            kl = kl * ratio_of(anchored)
        values, shown = policy, policy.detach().new_zeros(policy.shape)
        if kl is not None:
            shown = kl.detach()
            if settings.kl_in == "loss":
                values = policy + self._kl_coef(tokens) * kl
        if settings.entropy_coef:
            if tokens.entropy is None:
                raise ValueError("algorithm.entropy_coef wants the tokens' entropy; it is missing")
            bonus = settings.entropy_coef * tokens.entropy
            values = values - (bonus * selected_of(tokens) if self.selects_by_entropy else bonus)
        return Loss(values, {"policy": policy.detach(), "kl": shown, **metrics})

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Whose logprobs the loss's ratio is against, and of the weights the deviation and the
        effective sample size, a share of the tokens."""
        found = {"loss/anchor_rollout": float(self.settings.anchor == "rollout")}
        if (squared := metrics.get("loss/weight_squared")) is not None:
            mean = metrics["loss/weight"]
            found["loss/weight_std"] = math.sqrt(max(squared - mean**2, 0.0))
            found["loss/weight_ess"] = mean**2 / squared if squared else 0.0
        return found

    def _kl(self, tokens: Tokens) -> Tensor | None:
        """Of the policy in the loss, of the policy before the update in the reward; None without.
        Raises ValueError when the reference logprobs are missing though they are wanted, or were
        computed for nothing."""
        if (tokens.reference is None) != (self.settings.kl_coef == 0):
            given = "are missing" if tokens.reference is None else "were computed for nothing"
            raise ValueError(
                f"algorithm.kl_coef={self.settings.kl_coef}, but reference logprobs {given}"
            )
        if tokens.reference is None:
            return None
        policy = tokens.logprobs if self.settings.kl_in == "loss" else tokens.old
        return estimate(self.settings.kl_estimate, policy, tokens.reference)


def _with_effect(defaults: Mapping[str, Any], chosen: Mapping[str, str]) -> Mapping[str, Any]:
    """A preset's defaults, without its anchor where none of the chosen parts reads it."""
    if reads_anchor(*(chosen[kind] for kind in ("loss", "correction", "rejection"))):
        return defaults
    return {key: value for key, value in defaults.items() if key != "anchor"}


def _named(preset: type[PolicyGradient], value: Mapping[str, Any]) -> dict[str, Any]:
    """`value`, with what a name of verl or TRL stands for beside the name. Raises ValueError when
    the loss, the anchor or the rejection that it stands for is chosen otherwise beside it, and
    ConfigError for a name that is neither theirs nor a correction's."""
    correction = value.get("correction")
    named = CORRECTION_PRESETS.get(str(correction))
    if named is None:
        if isinstance(correction, str) and ":" not in correction:
            PARTS["correction"].find(correction, tuple(CORRECTION_PRESETS))
        return dict(value)
    for kind in {"loss", "anchor", "rejection"} & named.keys():
        given = value.get(kind, preset.defaults.get(kind, named[kind]))
        if given != named[kind]:
            whose = f"algorithm.{kind}={given}" if kind in value else f"{preset.__name__}'s {given}"
            raise ValueError(
                f"algorithm.correction={correction} stands for {kind}={named[kind]} too, "
                f"and {whose} is another; choose the parts one by one (docs/algorithms.md)"
            )
    return {**named, **value}
