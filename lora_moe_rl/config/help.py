"""`train --help`: every key of the config, with type, default and sentence."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import (
    Key,
    all_keys,
    member_keys,
    of_other_plugins,
    sections,
    type_text,
    value_of,
    value_text,
)
from lora_moe_rl.config.plugins import PARTS

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
                lines += _of_each(key, config)
                lines += [line for own in _own_keys(key.name) for line in _about(own, own.default)]
        lines.append("")
    return "\n".join(lines).rstrip()


def _of_each(key: Key, config: RunConfig) -> list[str]:
    """A key, once for each default and meaning that it has. The config's value stands where it is
    of what the config has chosen, elsewhere the default."""
    others = of_other_plugins().get(key.name, [])
    chosen = _chosen(config, key.name.partition(".")[0]) if others else set()
    theirs = {one.owners for one in (key, *others) if chosen & set(one.owners)}
    lines = []
    for one in (key, *others):
        own = not others or one.owners in theirs or not (one.owners or theirs)
        lines += _about(one, value_of(config, key.name, one.default) if own else one.default)
    return lines


def _chosen(config: RunConfig, section: str) -> set[str]:
    """The plug-ins, and parts as `part=name`, that a section of a config names."""
    settings, parts = getattr(config, section), PARTS if section == "algorithm" else ()
    names = [("", settings.name), *((f"{part}=", getattr(settings, part, "")) for part in parts)]
    return {head + name.strip() for head, several in names for name in several.split(",")}


def _about(key: Key, value: Any) -> list[str]:
    text = value_text(value)
    if text != " ".join(text.split()):  # which a wrapped line would not show
        text = json.dumps(value, ensure_ascii=False)
    setting = f"  {key.name}={text}   ({type_text(key.annotation)})"
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
