"""The section `model`: the frozen base, its tokenizer, and where it is held."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from lora_moe_rl.config.section import Section

# Whether trainer and engines hold the frozen base in one copy (base/).
HeldOnce = Literal["off", "auto", "on"]


class ModelConfig(Section):
    path: str = Field(
        "qwen3_moe",
        description="Hugging Face directory or hub name, or the name of a tiny model "
        "(lora-moe-rl make-tiny --help has them).",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; null: its main branch."
    )
    trust_remote_code: bool = Field(
        False,
        description="Let a tokenizer run code that comes with the model (Kimi-K2, Moonlight).",
    )
    chat_template: str | None = Field(
        None, description="A chat template (Jinja) in the place of the tokenizer's; null: its own."
    )
    chat_template_file: str | None = Field(
        None,
        description="A text file (UTF-8) to read chat_template from, once: the saved config holds "
        "the text.",
    )
    max_length: int = Field(512, ge=2, description="Longest prompt plus response, in tokens.")
    held_once: HeldOnce = Field(
        "off",
        description="The frozen base in one copy for trainer and engines, on one machine's CPU or "
        "its GPUs: never (off), where it can be (auto), or else the run does not start (on).",
    )
    held_dir: str = Field(
        "/dev/shm",
        description="Where that copy is held, as a file that all map: in memory, or on a disk.",
    )

    @field_validator("held_dir")
    @classmethod
    def _from_the_root(cls, value: str) -> str:
        if not Path(value).is_absolute():
            raise ValueError(
                f"model.held_dir={value} is relative, and trainer and engines may run in different "
                "places; give it from the root"
            )
        return value
