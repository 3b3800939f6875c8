"""`train --help`: every key of the config, with type, default and sentence."""

from __future__ import annotations

import textwrap
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import (
    Key,
    all_keys,
    member_keys,
    sections,
    type_text,
    value_of,
    value_text,
)

WIDTH = 100
INDENT = 6


def config_help(config: RunConfig) -> str:
    """The table as text, at most 100 columns wide; `config` gives the values to show, which are
    the defaults or those of a recipe."""
    lines = []
    for section, sentence in sections().items():
        lines += [f"{section}: {sentence}" if section else "The run itself.", ""]
        for key in all_keys().values():
            if key.name.rpartition(".")[0] == section:
                for one in (key, *key.others):
                    lines += _about(one, _shown(config, one, several=bool(key.others)))
                lines += [line for own in _own_keys(key.name) for line in _about(own, own.default)]
        lines.append("")
    return "\n".join(lines).rstrip()


def _shown(config: RunConfig, key: Key, several: bool) -> Any:
    """The value of `config`; where `several` plug-ins have such a key, with the config's alone."""
    head, _, last = key.name.rpartition(".")
    if several:
        field = type(value_of(config, head)).model_fields.get(last)
        if field is None or not key.sentence.endswith(field.description or ""):
            return key.default
    return value_of(config, key.name, key.default)


def _about(key: Key, value: Any) -> list[str]:
    setting = f"  {key.name}={value_text(value)}   ({type_text(key.annotation)})"
    indent = " " * INDENT
    return [
        *textwrap.wrap(
            setting,
            WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        *textwrap.wrap(key.sentence, WIDTH, initial_indent=indent, subsequent_indent=indent),
    ]


def _own_keys(name: str) -> list[Key]:
    """The keys that the sections of a map have beside those of the section around it: of
    `data.sets` those that `data` has not."""
    head = name.rpartition(".")[0]
    return [
        key
        for key in member_keys().values()
        if key.name.startswith(f"{name}.")
        and f"{head}.{key.name.rpartition('.')[2]}" not in all_keys()
    ]
