"""Supervised fine-tuning: the negative log-likelihood of the wanted answers.

Each token of an answer weighs the same in a step, as in TRL's SFTTrainer of prompts with
completions; `algorithm.aggregation` can say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from lora_moe_rl.algorithms.base import Algorithm, Known, Loss, Reduce, Signal, Tokens
from lora_moe_rl.config import AlgorithmConfig, LearnsFrom
from lora_moe_rl.data.samples import Group

LARGEST_EXPONENT = 700.0  # exp of more is no float64


class SFTConfig(AlgorithmConfig):
    group_size: int = Field(1, ge=1, le=1, description="Answers of each prompt.")


class SFT(Algorithm):
    Settings: ClassVar[type[AlgorithmConfig]] = SFTConfig
    metrics: Mapping[str, Reduce] = {"nll": "token_mean"}
    learns_from: ClassVar[LearnsFrom] = "answers"

    def signal(self, group: Group) -> Signal:
        return Signal.of_samples(group, np.ones(len(group.samples), np.float32))

    def loss(self, tokens: Tokens) -> Loss:
        values = -tokens.logprobs
        return Loss(values, {"nll": values.detach()})

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {"loss/perplexity": perplexity(metrics["loss/nll"])}

    def held_out(self, rows: Known) -> dict[str, float]:
        """The mean over all tokens of all answers, whatever algorithm.aggregation."""
        if rows.old is None:
            raise ValueError("algorithm=sft needs the policy's logprobs, and there are none")
        tokens = [one[mask] for one, mask in zip(rows.old, rows.masks, strict=True)]
        nll = -float(np.concatenate(tokens).mean())
        return {"nll": nll, "perplexity": perplexity(nll)}


def perplexity(nll: float) -> float:
    """exp of a mean over tokens. A NaN stays one."""
    return math.exp(min(nll, LARGEST_EXPONENT)) if nll == nll else nll
