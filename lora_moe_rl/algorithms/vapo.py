"""VAPO (arXiv:2504.05118): PPO whose lambda grows with the length of the sample, with a critic that
learns alone at first, a higher upper clip, a mean over tokens, and beside it the negative
log-likelihood of right samples, a mean over their tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from pydantic import Field, model_validator

from lora_moe_rl.algorithms.base import Loss, Tokens
from lora_moe_rl.algorithms.corrections.base import WeightSettings
from lora_moe_rl.algorithms.parts.critic import ActorCritic, CriticSettings
from lora_moe_rl.config import AlgorithmConfig

if TYPE_CHECKING:
    from torch import Tensor


class VAPOSettings(CriticSettings):
    nll_weight: float = Field(
        0.1,  # the paper's
        ge=0,
        description="Weight of the negative log-likelihood of right samples; 0: none.",
    )
    nll_above: float = Field(0.0, description="A sample is right when its reward is above this.")

    @model_validator(mode="after")
    def _one_mean(self):
        if not self.nll_weight:
            if self.nll_above:
                raise ValueError(
                    f"algorithm.nll_above={self.nll_above:g} has no effect with "
                    "algorithm.nll_weight=0"
                )
            return self
        if self.aggregation != "token-mean":
            raise ValueError(
                f"algorithm.nll_weight={self.nll_weight:g} is of a mean over the tokens of right "
                f"samples, and algorithm.aggregation={self.aggregation} would weigh it otherwise; "
                "take aggregation=token-mean, or nll_weight=0"
            )
        if isinstance(self, WeightSettings) and self.correction_normalize:
            raise ValueError(
                "algorithm.correction_normalize=true and algorithm.nll_weight="
                f"{self.nll_weight:g} each want a mean over the step, and there is one; set one of "
                "them"
            )
        return self


class VAPO(ActorCritic):
    Settings: ClassVar[type[AlgorithmConfig]] = VAPOSettings
    defaults = {"advantage": "length_adaptive_gae", "clip_high": 0.28, "critic_warmup": 50}

    def __init__(self, settings: VAPOSettings, max_response_tokens: int):
        super().__init__(settings, max_response_tokens)
        if settings.nll_weight:
            self.metrics = {**self.metrics, "nll": "token_mean"}

    @property
    def _nll(self) -> VAPOSettings:
        return cast(VAPOSettings, self.settings)

    @property
    def averages(self) -> bool:
        return self._nll.nll_weight > 0 or super().averages

    @property
    def averages_kept(self) -> bool:
        """The trainer's mean, too, is over the tokens that a rejection has left."""
        return self._nll.nll_weight > 0

    def averaged(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The share of the tokens in the loss that are of right samples."""
        if not self._nll.nll_weight:
            return super().averaged(tokens)
        right = self._right(tokens)
        return right, right.new_ones(right.shape)

    def loss(self, tokens: Tokens) -> Loss:
        """With -logprob of each token of a right sample, divided by the share of such tokens: what
        the trainer takes a mean of over all tokens is then a mean over these."""
        found = super().loss(tokens)
        if not self._nll.nll_weight:
            return found
        if tokens.step_mean is None:
            raise ValueError("algorithm.nll_weight wants the share of right tokens; it is missing")
        share = tokens.step_mean or 1.0  # of none there is nothing to divide
        nll = -tokens.logprobs * self._right(tokens) / share
        values = found.values + self._nll.nll_weight * nll
        return replace(found, values=values, metrics={**found.metrics, "nll": nll.detach()})

    def _right(self, tokens: Tokens) -> Tensor:
        """1.0 [T] for tokens of samples whose reward is above nll_above, else 0."""
        if tokens.rewards is None:
            raise ValueError("algorithm.nll_weight wants the samples' rewards; they are missing")
        right = (tokens.rewards > self._nll.nll_above) & tokens.mask
        return right.to(tokens.logprobs.dtype)
