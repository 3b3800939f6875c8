"""The section `reward`: which functions score samples, with what arguments and weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, field_validator

from lora_moe_rl.config.section import LONGEST_WAIT_S, Section

ENGINES = "engines"  # in the place of a server's address: the frozen base, on the run's engines
BASE = "base"  # the name of that model there
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]+")


class FunctionConfig(Section):
    """What one reward function has, whether it is the only one (`reward`) or one of several."""

    function: str | None = Field(
        None,
        description="'module:function' or 'file.py:function', in TRL's or verl's style.",
    )
    args: dict[str, Any] = Field(
        {},
        description="Arguments that the function gets beside those of the samples; of a class, "
        "those it is made with: reward.args.url=http://host:8000/v1.",
    )


class WeightedFunctionConfig(FunctionConfig):
    weight: float = Field(
        1.0,
        description="What the function's rewards are multiplied with before they are summed; 0: "
        "they are on record, and in no reward.",
    )


class RewardConfig(FunctionConfig):
    functions: dict[str, WeightedFunctionConfig] = Field(
        {},
        description="Several functions, by name, instead of one: a sample's reward is the weighted "
        "sum of theirs.",
    )
    timeout_s: float = Field(
        60, gt=0, le=LONGEST_WAIT_S, description="Longest time for the rewards of one prompt."
    )
    workers: int = Field(
        2,
        ge=1,
        le=1024,
        description="Processes of each plain reward function; an async one has one.",
    )
    max_failed: float = Field(
        0.5, ge=0, le=1, description="Stop when more than this share of a step's rewards failed."
    )

    @field_validator("functions", mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        """`reward.functions=null` and `reward.functions.NAME=null` take away what a recipe has set;
        `reward.functions.NAME=m:f` is short for `reward.functions.NAME.function=m:f`."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            return value
        given = {name: one for name, one in value.items() if one is not None}
        return {
            name: {"function": one} if isinstance(one, str) else one for name, one in given.items()
        }

    @field_validator("functions")
    @classmethod
    def _names(cls, value: dict[str, WeightedFunctionConfig]) -> dict[str, WeightedFunctionConfig]:
        for name in value:
            if not FUNCTION_NAME.fullmatch(name):
                raise ValueError(
                    f"reward.functions has a function named {name!r}: a name is a part of keys and "
                    "of metrics, and may hold only letters, digits, _ and -"
                )
        return value


@dataclass(frozen=True)
class RewardFunction:
    """A function as a run calls it: `function` as its `key` names it, None when that is not set.

    `name` is that of reward.functions, '' for a function that is alone.
    """

    key: str
    function: str | None
    args: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    name: str = ""

    @property
    def asks_engines(self) -> bool:
        """Whether it is to be given the address of the run's own engines."""
        return self.args.get("url") == ENGINES
