"""`train --help`: every key of the config, with type, default and sentence."""

from __future__ import annotations

import textwrap

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import all_keys, sections, type_text, value_of, value_text

WIDTH = 100
INDENT = 6


def config_help(config: RunConfig) -> str:
    """The table as text, at most 100 columns wide; `config` gives the values to show, which are
    the defaults or those of a recipe."""
    lines = []
    for section, sentence in sections().items():
        lines += [f"{section}: {sentence}" if section else "The run itself.", ""]
        for key in all_keys().values():
            if key.name.rpartition(".")[0] != section:
                continue
            value = value_text(value_of(config, key.name, key.default))
            lines += textwrap.wrap(
                f"  {key.name}={value}   ({type_text(key.annotation)})",
                WIDTH,
                subsequent_indent=" " * INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines += textwrap.wrap(
                key.sentence, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
            )
        lines.append("")
    return "\n".join(lines).rstrip()
