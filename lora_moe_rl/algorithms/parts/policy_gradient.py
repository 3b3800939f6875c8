"""What most algorithms are: an advantage, a loss, a correction and a rejection put together.

A preset is a subclass that gives the parts and their settings other defaults. Whatever it does not
say can be said in the config, part by part: `algorithm=grpo algorithm.loss=gspo`. The settings of a
part exist with it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, create_model, model_validator

from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.base import Algorithm, Loss, Pass, Reduce, Signal, Tokens
from lora_moe_rl.algorithms.parts.correction_presets import CORRECTION_PRESETS
from lora_moe_rl.algorithms.parts.kl import estimate
from lora_moe_rl.algorithms.parts.overlong import soft_punishment
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.config.plugins import PARTS, choices
from lora_moe_rl.data.samples import Group

if TYPE_CHECKING:
    from torch import Tensor


class PolicyGradientConfig(AlgorithmConfig):
    advantage: str = Field(
        "grpo", description="A file of algorithms/advantages/, or file.py:Class."
    )
    loss: str = Field("ppo_clip", description="A file of algorithms/losses/, or file.py:Class.")
    correction: str = Field(
        "none",
        description="A file of algorithms/corrections/, or file.py:Class; or a name that verl or "
        "TRL has for correction and rejection together (docs/algorithms.md).",
    )
    rejection: str = Field(
        "none", description="A file of algorithms/rejections/, or file.py:Class."
    )
    anchor: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="Whose logprobs the loss's ratio is against: the trainer's of before the "
        "update, or the engine's.",
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL to the base (adapters off).")
    kl_estimator: Literal["k2", "k3", "k3+"] = Field(
        "k3", description="How that KL is estimated; k3+: the value of k3 with k2's gradient."
    )
    overlong_buffer: int = Field(
        0, ge=0, description="Tokens before the longest response over which a reward sinks."
    )
    overlong_penalty: float = Field(
        1.0, gt=0, description="What a reward has lost at the longest response."
    )

    @model_validator(mode="after")
    def _together(self):
        found = {kind: PARTS[kind].find(getattr(self, kind)) for kind in PARTS}
        loss, correction, rejection = found["loss"], found["correction"], found["rejection"]
        if loss.level == "sequence" and rejection.rejects and rejection.level == "token":
            raise ValueError(
                f"algorithm.loss={self.loss} has one ratio a sample and algorithm.rejection="
                f"{self.rejection} takes single tokens out of it; take rejection=sequence_mean, or "
                "a loss with a ratio a token"
            )
        if correction.level == "sequence" and rejection.rejects and rejection.level == "token":
            raise ValueError(
                f"algorithm.correction={self.correction} weighs whole samples and "
                f"algorithm.rejection={self.rejection} takes single tokens out of them; take "
                "rejection=sequence_sum, or a correction by token"
            )
        if self.anchor == "rollout" and correction.corrects and loss.has_ratio:
            raise ValueError(
                f"algorithm.anchor=rollout puts the engine's logprobs into the ratio of "
                f"loss={self.loss}, and algorithm.correction={self.correction} would weigh with "
                "the same ratio once more; set one of them, or loss=reinforce"
            )
        used = loss.has_ratio or correction.corrects or rejection.rejects
        if self.anchor == "rollout" and not used:
            raise ValueError(
                f"algorithm.anchor=rollout has no effect with loss={self.loss}, which has no "
                "ratio, and without a correction"
            )
        if self.group_size < 2 and found["advantage"].compares_group:
            raise ValueError(
                f"algorithm.advantage={self.advantage} compares the samples of a prompt, and "
                f"algorithm.group_size={self.group_size} leaves none to compare with"
            )
        for option, decider in (
            ("kl_estimator", "kl_coef"),
            ("overlong_penalty", "overlong_buffer"),
        ):
            default = type(self).model_fields[option].default
            if getattr(self, option) != default and not getattr(self, decider):
                raise ValueError(
                    f"algorithm.{option}={getattr(self, option)} has no effect with "
                    f"algorithm.{decider}=0"
                )
        return self


class PolicyGradient(Algorithm):
    """`defaults`: what the preset sets of the parts and their settings."""

    Settings: ClassVar[type[AlgorithmConfig]] = PolicyGradientConfig
    composed: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {}

    settings: PolicyGradientConfig

    def __init__(self, settings: AlgorithmConfig, max_response_tokens: int):
        super().__init__(settings, max_response_tokens)
        parts = {kind: PARTS[kind].find(getattr(settings, kind)) for kind in PARTS}
        self._advantage = parts["advantage"](settings)
        self._loss = parts["loss"](settings)
        self._correction = parts["correction"](settings)
        self._rejection = parts["rejection"](settings)
        own: dict[str, Reduce] = {"policy": "token_mean", "kl": "token_mean"}
        self.metrics = {**own, **self._loss.metrics, **self._correction.metrics}

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> AlgorithmConfig:
        """Settings of the preset and of the parts that `value` chooses. Raises ValueError for those
        of another part, with the part whose they are."""
        value = dict(value)
        named = CORRECTION_PRESETS.get(str(value.get("correction")), {})
        value |= {**named, **{k: v for k, v in value.items() if k != "correction" or not named}}
        chosen = {}
        for kind in PARTS:
            default = cls.defaults.get(kind, cls.Settings.model_fields[kind].default)
            chosen[kind] = value.get(kind, default)
            if not isinstance(chosen[kind], str):
                raise ValueError(f"algorithm.{kind}={chosen[kind]!r} is not a name")
        settings = _settings_class(cls, tuple(chosen.items()))
        for key in value.keys() - settings.model_fields.keys():
            parts = [label for label in choices("algorithm") if "=" in label]
            owners = [label for label in parts if key in choices("algorithm")[label].model_fields]
            if owners:
                kind = owners[0].partition("=")[0]
                raise ValueError(
                    f"algorithm.{key}={value[key]} is no setting of algorithm.{kind}="
                    f"{chosen[kind]}: it is one of {' or '.join(owners)}"
                )
        return settings.model_validate(value)

    @classmethod
    def corrects(cls, settings: PolicyGradientConfig) -> bool:
        return (
            PARTS["correction"].find(settings.correction).corrects or settings.anchor == "rollout"
        )

    @property
    def passes(self) -> frozenset[Pass]:
        return frozenset({"reference"} if self.settings.kl_coef else ())

    @property
    def rejects(self) -> bool:
        return self._rejection.rejects

    def signals(self, groups: Sequence[Group]) -> list[Signal]:
        sizes = [len(group.samples) for group in groups]
        samples = [sample for group in groups for sample in group.samples]
        step = Rewarded(
            np.concatenate([self._rewards(group) for group in groups]),
            np.repeat(np.arange(len(groups)), sizes),
            [sample.mask for sample in samples],
        )
        advantages = iter(self._advantage.of_step(step))
        return [
            Signal.of_tokens(group, [next(advantages) for _ in group.samples]) for group in groups
        ]

    def _rewards(self, group: Group) -> np.ndarray:
        rewards = np.asarray(group.rewards, np.float64)
        if not self.settings.overlong_buffer:
            return rewards
        lengths = np.array([len(sample.response_ids) for sample in group.samples])
        return rewards + soft_punishment(
            lengths,
            self.max_response_tokens,
            self.settings.overlong_buffer,
            self.settings.overlong_penalty,
        )

    def keep(self, tokens: Tokens) -> Tensor:
        return self._rejection.keep((tokens.old - tokens.rollout).detach(), tokens)

    def loss(self, tokens: Tokens) -> Loss:
        settings = self.settings
        at_rollout = settings.anchor == "rollout"
        anchored = replace(tokens, old=tokens.rollout) if at_rollout else tokens
        policy, metrics = self._loss.values(anchored)
        if self._correction.corrects:
            trainer = tokens.logprobs.detach() if at_rollout else tokens.old
            weights, of_weights = self._correction.weights(trainer - tokens.rollout, tokens)
            policy, metrics = policy * weights, metrics | of_weights
        kl = self._kl(tokens)
        values = policy if kl is None else policy + settings.kl_coef * kl
        shown = policy.detach().new_zeros(policy.shape) if kl is None else kl.detach()
        return Loss(values, {"policy": policy.detach(), "kl": shown, **metrics})

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The effective sample size of the weights, as a share of the tokens."""
        squared = metrics.get("loss/weight_squared")
        return {"loss/weight_ess": metrics["loss/weight"] ** 2 / squared} if squared else {}

    def _kl(self, tokens: Tokens) -> Tensor | None:
        """Raises ValueError when the reference logprobs are missing though they are wanted, or were
        computed for nothing."""
        if (tokens.reference is None) != (self.settings.kl_coef == 0):
            given = "are missing" if tokens.reference is None else "were computed for nothing"
            raise ValueError(
                f"algorithm.kl_coef={self.settings.kl_coef}, but reference logprobs {given}"
            )
        if tokens.reference is None:
            return None
        return estimate(self.settings.kl_estimator, tokens.logprobs, tokens.reference)


@cache
def _settings_class(
    preset: type[PolicyGradient], chosen: tuple[tuple[str, str], ...]
) -> type[AlgorithmConfig]:
    """The preset's settings with those of the chosen parts, and the preset's defaults."""
    bases = (preset.Settings, *(PARTS[kind].find(name).Settings for kind, name in chosen))
    fields: dict[str, Any] = {}
    for name, default in preset.defaults.items():
        for base in bases:
            if name in base.model_fields:
                field = copy(base.model_fields[name])
                field.default = default
                fields[name] = (field.annotation, field)
    # A base whose own bases are among the others would come before them.
    unique = [
        b for b in dict.fromkeys(bases) if not any(issubclass(o, b) and o is not b for o in bases)
    ]
    return create_model(preset.__name__ + "Settings", __base__=tuple(unique), **fields)
