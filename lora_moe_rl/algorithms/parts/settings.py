"""The settings of an algorithm that is put together from parts, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lora_moe_rl.algorithms.advantages.base import Advantage
from lora_moe_rl.algorithms.corrections.base import Correction, WeightSettings
from lora_moe_rl.algorithms.losses.base import PolicyLoss
from lora_moe_rl.algorithms.parts.correction_presets import settings_of
from lora_moe_rl.algorithms.parts.kl_control import LARGEST_ERROR
from lora_moe_rl.algorithms.parts.selection import check_selection
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.config.reference import ReferenceSettings
from lora_moe_rl.config.teacher import SelfTeacherSettings


class PolicyGradientConfig(AlgorithmConfig, ReferenceSettings):
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
        "none",
        description="A file of algorithms/rejections/, or file.py:Class; or several, separated by "
        "commas: what all keep stays, and a setting that several have takes one value for each.",
    )
    anchor: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="Whose logprobs the loss's ratio is against: the trainer's of before the "
        "update, or the engine's.",
    )
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the KL to algorithm.reference, the base by default."
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="Whether that KL is added to the loss of each token, or taken from its reward "
        "before advantages are made.",
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] | None = Field(
        None,
        description="How that KL is estimated (k3+: the value of k3 with k2's gradient); null: k3 "
        "in the loss, k1 in the reward.",
    )
    kl_weighted: bool = Field(
        False,
        description="Weigh that KL of a token, in the loss, with its ratio, through which the "
        "gradient goes too: that of k1 and k3 is then the KL's own (DeepSeek-V3.2).",
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Let kl_coef follow the KL from step to step, so that this comes near the "
        "target, in nats a token (adaptive KL); null: it stays as it is.",
    )
    kl_horizon: float = Field(
        10000,  # verl's value
        gt=0,
        description="With kl_target: over about how many samples kl_coef follows; more is slower.",
    )
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the entropy of what each token is sampled from, which is taken from "
        "its loss: it keeps the policy from narrowing; 0: none, and none is computed.",
    )
    top_entropy_quantile: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the tokens of each optimizer step, those of the highest entropy, "
        "that the policy learns from; 1: from all.",
    )
    overlong_buffer: int = Field(
        0, ge=0, description="Tokens before the longest response over which a reward sinks."
    )
    overlong_penalty: float = Field(
        1.0, gt=0, description="What a reward has lost at the longest response."
    )

    @property
    def kl_estimate(self) -> str:
        return self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")

    # Whether there is a critic, whose values advantages may want.
    has_critic: ClassVar[bool] = False

    @property
    def correction_part(self) -> type[Correction]:
        """The correction itself, which `correction` may be another name of."""
        return PARTS["correction"].find(settings_of(self.correction)["correction"])

    def stood_for(self) -> Mapping[str, Any]:
        return settings_of(self.correction)

    @model_validator(mode="after")
    def _together(self):
        self._check_samples()
        self._check_anchor()
        self._check_updates()
        check_selection(self)
        self._check_advantage()
        self._check_teacher()
        self._check_kl()
        self._check_unused()
        self._check_horizon()
        return self

    def _check_samples(self) -> None:
        """What goes by whole samples and what goes by tokens."""
        loss, correction = PARTS["loss"].find(self.loss), self.correction_part
        for name in rejection_names(self.rejection):
            rejection = PARTS["rejection"].find(name)
            if not rejection.rejects or rejection.level != "token":
                continue
            if loss.level == "sequence":
                raise ValueError(
                    f"algorithm.loss={self.loss} has one ratio a sample and algorithm.rejection="
                    f"{name} takes single tokens out of it; take rejection=sequence_mean, or a "
                    "loss with a ratio a token"
                )
            if correction.level == "sequence":
                raise ValueError(
                    f"algorithm.correction={self.correction} weighs whole samples and "
                    f"algorithm.rejection={name} takes single tokens out of them; take "
                    "rejection=sequence_sum, or a correction by token"
                )

    def _check_anchor(self) -> None:
        """What the ratio is against, and what is corrected beside it."""
        if self.anchor != "rollout":
            return
        loss, correction = PARTS["loss"].find(self.loss), self.correction_part
        if correction.corrects and loss.has_ratio:
            raise ValueError(
                f"algorithm.anchor=rollout puts the engine's logprobs into the ratio of "
                f"loss={self.loss}, and algorithm.correction={self.correction} would weigh with "
                "the same ratio once more; set one of them, or loss=reinforce"
            )
        if isinstance(self, WeightSettings) and self.correction_normalize:
            raise ValueError(
                "algorithm.correction_normalize=true divides by the mean weight of the policy "
                "before the update, and with algorithm.anchor=rollout weights are of the policy "
                "that is being updated; set anchor=trainer, or leave the weights as they are"
            )
        if not reads_anchor(self.loss, settings_of(self.correction)["correction"], self.rejection):
            raise ValueError(
                f"algorithm.anchor=rollout has no effect with loss={self.loss}, which has no "
                "ratio, and without a correction"
            )

    def _check_updates(self) -> None:
        """Several updates of the same samples: all but the first are of another policy's."""
        loss, correction = PARTS["loss"].find(self.loss), self.correction_part
        allowed = loss.has_ratio or loss.of_any_policy
        if self.on_policy or allowed or (self.anchor == "rollout" and correction.corrects):
            return
        raise ValueError(
            f"algorithm.epochs={self.epochs} and algorithm.mini_batches={self.mini_batches} make "
            f"{self.updates_per_step} updates of the same samples, and algorithm.loss={self.loss} "
            "has no ratio by which the later ones allow for what the first have changed; set both "
            "to 1, take a loss with a ratio (ppo_clip, cispo), or weigh each token by the policy "
            "that is being updated: algorithm.anchor=rollout with algorithm.correction=tis"
        )

    def _check_advantage(self) -> None:
        """What an advantage wants of prompts, rewards and a critic."""
        advantage = PARTS["advantage"].find(self.advantage)
        if advantage.by_token(self):
            self._check_averages("turn" if advantage.compares_turns else "token")
        if advantage.needs_values and not self.has_critic:
            raise ValueError(
                f"algorithm.advantage={self.advantage} needs a critic's value of each token, and "
                f"algorithm={self.name} has no critic; choose an advantage that compares the "
                "samples of a prompt (grpo, rloo), or reinforce_pp"
            )
        if not advantage.takes_negative and self.overlong_buffer:
            raise ValueError(
                f"algorithm.advantage={self.advantage} takes no negative rewards, and "
                f"algorithm.overlong_buffer={self.overlong_buffer} makes a reward of 0 negative "
                "near the longest response; set one of them, or mask_truncated=true for the buffer"
            )
        if advantage.separates_rewards and self.overlong_buffer:
            raise ValueError(
                f"algorithm.advantage={self.advantage} normalizes each reward function by itself, "
                f"and algorithm.overlong_buffer={self.overlong_buffer} takes from their sum; make "
                "the punishment one of reward.functions, or take mask_truncated=true"
            )
        if advantage.compares_turns:
            self._check_turns()
        if advantage.greedy_baseline and self.kl_in == "reward" and self.kl_coef:
            raise ValueError(
                f"algorithm.advantage={self.advantage} compares rewards with that of a greedy "
                "sample, of which no KL is known to take from it; take kl_in=loss"
            )
        if self.group_size > 1:
            return
        if advantage.compares_group:
            raise ValueError(
                f"algorithm.advantage={self.advantage} compares the samples of a prompt, and "
                f"algorithm.group_size={self.group_size} leaves none to compare with"
            )
        if self.draw_again and not advantage.greedy_baseline:
            raise ValueError(
                f"algorithm.draw_again={self.draw_again} replaces prompts whose samples all have "
                f"one reward, which is every prompt with algorithm.group_size={self.group_size}"
            )

    def _check_averages(self, each: str) -> None:
        """A loss that would undo what an advantage tells apart within a sample."""
        if PARTS["loss"].find(self.loss).averages_advantages:
            raise ValueError(
                f"algorithm.advantage={self.advantage} gives each {each} an advantage of its own, "
                f"and algorithm.loss={self.loss} takes their mean over the sample; take another "
                "loss, as ppo_clip or gspo"
            )

    def _check_turns(self) -> None:
        """What gives all turns of a sample one and the same, and what is known too late."""
        if self.kl_in == "reward" and self.kl_coef:
            raise ValueError(
                f"algorithm.advantage={self.advantage} is made when the samples are scored, before "
                "the KL of algorithm.kl_in=reward is known; take kl_in=loss"
            )

    def _check_teacher(self) -> None:
        """What goes by rewards, and has nothing to go by when a teacher alone teaches."""
        needs_teacher = PARTS["advantage"].find(self.advantage).needs_teacher
        distils = PARTS["loss"].find(self.loss).divergence is not PolicyLoss.divergence
        itself = isinstance(self, SelfTeacherSettings)
        if distils and not needs_teacher:
            raise ValueError(
                f"algorithm.loss={self.loss} compares the policy with a teacher's likeliest "
                f"tokens, and algorithm.advantage={self.advantage} asks none; set advantage=teacher"
                " or self_teacher (algorithm=distillation)"
            )
        if not needs_teacher:
            return
        weight = getattr(self, "reward_weight")  # noqa: B009 (of the part)
        if distils and weight:
            raise ValueError(
                f"algorithm.reward_weight={weight:g} weighs advantages of rewards, and algorithm."
                f"loss={self.loss} goes by no advantage; leave it at 0, or take algorithm=opd"
            )
        if self.draw_again and not itself:
            raise ValueError(
                f"algorithm.draw_again={self.draw_again} replaces prompts whose rewards are all "
                f"equal, and algorithm.advantage={self.advantage} learns from them all the same; "
                "leave it at 0"
            )
        if self.reweight and not weight:
            raise ValueError(
                f"algorithm.reweight={self.reweight} draws samples by rewards, which teach nothing "
                "with algorithm.reward_weight=0; set one of them"
            )
        if self.kl_in == "reward" and self.kl_coef:
            raise ValueError(
                f"algorithm.advantage={self.advantage} is made when the samples are scored, before "
                "the KL of algorithm.kl_in=reward is known; take kl_in=loss"
            )
        if self.overlong_buffer and not weight:
            raise ValueError(
                f"algorithm.overlong_buffer={self.overlong_buffer} takes from rewards, which teach "
                "nothing with algorithm.reward_weight=0; set one of them"
            )
        if itself and self.feedback_key is None and self.group_size == 1:
            raise ValueError(
                f"algorithm.advantage={self.advantage} shows a prompt's samples to each other, and "
                "algorithm.group_size=1 leaves none to show; set algorithm.feedback_key"
            )
        if weight and self.group_size == 1:
            raise ValueError(
                f"algorithm.reward_weight={weight:g} compares the rewards of a prompt's samples, "
                "and algorithm.group_size=1 leaves none to compare with"
            )

    def _check_kl(self) -> None:
        """Where a KL is, and how it is estimated."""
        if self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_weighted:
            raise ValueError(
                "algorithm.kl_estimator=k1 has a gradient of 0 in the mean, and with "
                "algorithm.kl_in=loss would do nothing; take k2, k3 or k3+, kl_weighted=true, or "
                "kl_in=reward"
            )
        if self.kl_weighted and self.kl_in == "reward":
            raise ValueError(
                "algorithm.kl_weighted=true weighs a KL in the loss, and algorithm.kl_in=reward "
                "takes it from the reward; set one of them"
            )
        if self.kl_weighted and self.kl_estimate in ("k2", "k3+"):
            raise ValueError(
                f"algorithm.kl_estimator={self.kl_estimate} has the gradient of the KL without a "
                "weight, and with algorithm.kl_weighted=true would have another; take k1 or k3"
            )
        if self.kl_in == "reward" and self.kl_estimator == "k3+":
            raise ValueError(
                "algorithm.kl_estimator=k3+ differs from k3 by its gradient, and with "
                "algorithm.kl_in=reward there is none; take k3"
            )
        if (
            self.kl_in == "reward"
            and self.kl_coef
            and PARTS["advantage"].find(self.advantage).separates_rewards
        ):
            raise ValueError(
                f"algorithm.advantage={self.advantage} normalizes each reward function by itself, "
                "and algorithm.kl_in=reward takes a KL from their sum; take kl_in=loss"
            )
        takes_negative = PARTS["advantage"].find(self.advantage).takes_negative
        if self.kl_in == "reward" and self.kl_coef and not takes_negative:
            raise ValueError(
                f"algorithm.advantage={self.advantage} takes no negative rewards, and "
                "algorithm.kl_in=reward makes them so; take kl_in=loss"
            )

    def _check_horizon(self) -> None:
        """A weight that falls by more than itself in one step would turn the KL round."""
        samples = self.prompts_per_step * self.group_size
        least = LARGEST_ERROR * samples
        if self.kl_target is not None and self.kl_horizon <= least:
            raise ValueError(
                f"algorithm.kl_horizon={self.kl_horizon:g} is too short for steps of {samples} "
                f"samples: kl_coef may change by {LARGEST_ERROR:g} x {samples} / kl_horizon of "
                f"itself in one, and would fall to 0 or below; set it above {least:g}"
            )

    def _check_unused(self) -> None:
        advantage, within = PARTS["advantage"].find(self.advantage), self.equal_within
        alone = advantage.needs_teacher and not getattr(self, "reward_weight")  # noqa: B009
        compares = advantage.of_group is not Advantage.of_group and not alone
        read = compares or self.draw_again
        if not read and within != type(self).model_fields["equal_within"].default:
            raise ValueError(
                f"algorithm.equal_within={within:g} has no effect with algorithm.advantage="
                f"{self.advantage}{' and reward_weight=0' if alone else ''}, which compares no "
                "rewards of a prompt, and algorithm.draw_again=0; leave it out"
            )
        for option, decider in (
            ("kl_in", "kl_coef"),
            ("kl_estimator", "kl_coef"),
            ("kl_weighted", "kl_coef"),
            ("reference", "kl_coef"),
            ("kl_target", "kl_coef"),
            ("kl_horizon", "kl_target"),
            ("overlong_penalty", "overlong_buffer"),
        ):
            default = type(self).model_fields[option].default
            if getattr(self, option) != default and not getattr(self, decider):
                raise ValueError(
                    f"algorithm.{option}={getattr(self, option)} has no effect with "
                    f"algorithm.{decider}={'0' if decider != 'kl_target' else 'null'}"
                )


def reads_anchor(loss: str, correction: str, rejection: str) -> bool:
    """Whether it matters to these parts whose logprobs algorithm.anchor says."""
    rejects = any(PARTS["rejection"].find(name).rejects for name in rejection_names(rejection))
    corrects = PARTS["correction"].find(correction).corrects
    return PARTS["loss"].find(loss).has_ratio or corrects or rejects


def rejection_names(text: str) -> tuple[str, ...]:
    """The rejections that algorithm.rejection names. Raises ValueError for `none` among others."""
    names = tuple(part.strip() for part in text.split(","))
    if len(names) > 1 and {"none", ""} & set(names):
        raise ValueError(
            f"algorithm.rejection={text} names several, and one of them is none; leave it out"
        )
    return names
