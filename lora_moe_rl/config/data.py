"""The sections `data` and `data.sets.NAME`: where prompts come from and how they are made."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator

from lora_moe_rl.config.section import Section

SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


class SourceConfig(Section):
    """What one data set has, whether it is the only one (`data`) or one of several."""

    path: str | None = Field(
        None,
        description="JSONL, CSV or parquet file, a directory of datasets' save_to_disk, or a hub "
        "data set name.",
    )
    subset: str | None = Field(
        None, description="Configuration of a hub data set that has several (GSM8K: main)."
    )
    split: str = Field("train", description="Split of a hub data set.")
    generator: str | None = Field(
        None,
        description="'module:function' or 'file.py:function' that yields rows (dicts with a "
        "prompt), for ever or not.",
    )
    args: dict[str, Any] = Field(
        {}, description="Keyword arguments of the generator: data.args.level=3."
    )
    prompt_key: str | None = Field(
        None, description="Column of the prompt; null: the only one of prompt, messages, question."
    )
    answer_key: str | None = Field(
        None, description="Column given to rewards as `answer`; null: the only one of answer, "
        "solution, label, ground_truth, if any. With algorithm=sft that of the wanted answer, "
        "null: completion, or the last of messages.",
    )  # fmt: skip
    chat_template: bool = Field(
        False, description="Apply the tokenizer's chat template to string prompts too."
    )
    system_prompt: str | None = Field(
        None, description="System message put before a prompt that has none; needs a chat template."
    )
    system_prompt_file: str | None = Field(
        None,
        description="A text file (UTF-8) to read system_prompt from, once: the saved config holds "
        "the text.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description='What the chat template is given beside the messages: {"enable_thinking": '
        "false}; a row's own column chat_template_kwargs lies over it.",
    )
    too_long: Literal["error", "drop"] = Field(
        "error",
        description="A prompt that leaves no room for the response: stop, or leave its row out.",
    )
    filter: dict[str, tuple[float | None, float | None]] = Field(
        {},
        description="Leave out rows whose column is not within [least, most], null for no bound: "
        '{"pass_rate": [0.1, 0.9]}.',
    )
    order: str = Field(
        "shuffle",
        pattern="^(shuffle|sequential|by:-?[^-].*)$",
        description="Of rows in an epoch: shuffle (anew in each, by seed), sequential, or "
        "by:COLUMN, the smallest number first (by:-COLUMN: the largest).",
    )
    limit: int | None = Field(
        None, ge=1, description="Read only so many rows, the first; null: all."
    )

    _place: str = PrivateAttr("data")

    @property
    def order_column(self) -> str | None:
        """The column that orders the rows, if one does."""
        name = self.order.removeprefix("by:")
        return name.removeprefix("-") if name != self.order else None

    def key(self, name: str) -> str:
        """A key of this section as a user writes it: `data.path`, `data.sets.math.path`."""
        return f"{self._place}.{name}"

    def at(self, place: str) -> Self:
        """The same settings, which name themselves by `place`."""
        copy = self.model_copy()
        copy._place = place
        return copy


class SetConfig(SourceConfig):
    ratio: float = Field(
        1.0,
        gt=0,
        description="Share of the prompts that are drawn from this set, beside the others' ratios.",
    )
    reward: str | None = Field(
        None,
        description="Reward function of this set, or names of reward.functions with commas; null: "
        "reward.function, or all of reward.functions.",
    )


def without_null(value: Any) -> Any:
    """Sets by their names, without those that are null; null itself is none at all."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if one is not None}
    return value


def check_names(key: str, names: Iterable[str]) -> None:
    """Raises ValueError for a name that the sets under `key` may not have."""
    for name in names:
        if not SET_NAME.fullmatch(name):
            raise ValueError(
                f"{key} has a set named {name!r}: a name is a part of keys and of metrics, "
                "and may hold only letters, digits, _ and -"
            )


class DataConfig(SourceConfig):
    sets: dict[str, SetConfig] = Field(
        {},
        description="Several data sets, by name, instead of one: each has the keys of data, a "
        "ratio and a reward.",
    )

    @field_validator("sets", mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        """`data.sets=null` and `data.sets.NAME=null` take away what a recipe has set."""
        return without_null(value)

    @field_validator("sets")
    @classmethod
    def _names(cls, value: dict[str, SetConfig]) -> dict[str, SetConfig]:
        check_names("data.sets", value)
        return value

    def sources(self) -> dict[str, SourceConfig]:
        """Every data set by its name; the only one has the name ''."""
        if not self.sets:
            return {"": self}
        return {name: one.at(f"data.sets.{name}") for name, one in self.sets.items()}
