"""What others call our settings (`alias_table.py`), for the error of an unknown
key and a page of docs.

A name stands for every key that ends in it: `rollout.n` for `actor_rollout_ref.rollout.n`.
"""

from __future__ import annotations

from lora_moe_rl.config.alias_table import ALIASES, MISSING, Alias, Missing

_BY_NAME = {name: one for one in (*ALIASES, *MISSING) for name in one.names}


def find(name: str) -> Alias | Missing | None:
    """What is known of a key that nobody here knows: of its longest end that is in the tables, or
    else of what it is in (`reward_kwargs.scale`)."""
    parts = name.replace("-", "_").split(".")
    for last in range(len(parts), 0, -1):
        for first in range(last):
            if (found := _BY_NAME.get(".".join(parts[first:last]))) is not None:
                return found
    return None


def as_table() -> str:
    """The rows of docs/from_verl.md."""
    return "\n".join(
        f"| {', '.join(f'`{name}`' for name in names)} | `{ours}` | {note} |"
        for names, ours, note in ALIASES
    )


def missing_as_table() -> str:
    """The rows of what there is not, there too."""
    return "\n".join(
        f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for names, why in MISSING
    )
