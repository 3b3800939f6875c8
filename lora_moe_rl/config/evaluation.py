"""The sections `eval` and `eval.sets.NAME`: held-out data, when it is asked, how it is judged."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from lora_moe_rl.config.data import SourceConfig, check_names, without_null
from lora_moe_rl.config.section import Section
from lora_moe_rl.rollout.facts import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE

EVAL = "eval/"  # what the name of an eval set begins with where data sets are named too


class EvalSetConfig(SourceConfig):
    order: str = Field(
        "sequential",
        pattern="^sequential$",
        description="Every row is asked once, in the order of the data.",
    )
    samples: int = Field(1, ge=1, description="Samples of each prompt: the k of avg@k.")
    temperature: float | None = Field(
        None,
        ge=0,
        le=HIGHEST_TEMPERATURE,
        description="Sampling temperature, 0 for the likeliest token; null: rollout.temperature.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens that have this much probability together; "
        "1: from all.",
    )
    top_k: int = Field(
        0, ge=0, description="Sample from so many tokens, the likeliest ones; 0: from all."
    )
    max_response_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest response, in tokens; null: rollout.max_response_tokens.",
    )
    reward: str | None = Field(
        None,
        description="Reward function of this set, or names of reward.functions with commas; null: "
        "reward.function, or all of reward.functions.",
    )
    right_at: float = Field(
        1.0,
        description="A sample is right, for pass@k and maj@k, when its reward is at least this.",
    )
    pass_at: tuple[int, ...] = Field(
        (),
        description="The k of pass@k, none above samples; empty: 1, 2, 4, … up to samples, and "
        "samples.",
    )
    answer: Literal["text", "number", "boxed"] | None = Field(
        None,
        description="What of a response is its answer, for maj@k: all of it (text), its last "
        "number, or what stands in its last \\boxed{}; null: no maj@k.",
    )
    group_by: str | None = Field(
        None, description="Column by whose values all metrics of the set are told once more."
    )

    @field_validator("temperature")
    @classmethod
    def _as_sampled(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature={value:g} of an eval set is not what vLLM would sample with (it "
                f"raises it to {LOWEST_TEMPERATURE}); use 0, or {LOWEST_TEMPERATURE} or more"
            )
        return value

    @property
    def ks(self) -> list[int]:
        """The k of pass@k, ascending."""
        if self.pass_at:
            return sorted(set(self.pass_at))
        powers = {2**i for i in range(self.samples.bit_length())}
        return sorted(powers | {self.samples})


class EvalConfig(Section):
    sets: dict[str, EvalSetConfig] = Field(
        {}, description="Held-out data sets, by name: each has the keys of data, and its own."
    )
    every: int = Field(
        0, ge=0, description="Steps between evaluations; 0: only before the first and at the end."
    )
    at_start: bool = Field(True, description="Evaluate before the first step.")
    seed: int = Field(
        0,
        ge=0,
        description="Seed of the samples, the same in each evaluation, whatever the run's seed.",
    )
    prompts_at_once: int = Field(
        32, ge=1, description="Prompts of an evaluation that engines are asked at the same time."
    )

    @field_validator("sets", mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        """`eval.sets=null` and `eval.sets.NAME=null` take away what a recipe has set."""
        return without_null(value)

    @field_validator("sets")
    @classmethod
    def _names(cls, value: dict[str, EvalSetConfig]) -> dict[str, EvalSetConfig]:
        check_names("eval.sets", value)
        return value

    def sources(self) -> dict[str, EvalSetConfig]:
        """Every set, by its name among all data sets of a run: `eval/NAME`."""
        return {EVAL + name: one.at(f"eval.sets.{name}") for name, one in self.sets.items()}

    def is_due(self, step: int, last: int) -> bool:
        """Whether a run whose last step is `last` evaluates what `step` has made; step 0 is what it
        begins with."""
        if not self.sets:
            return False
        if step == 0:
            return self.at_start
        return step == last or (self.every > 0 and step % self.every == 0)
