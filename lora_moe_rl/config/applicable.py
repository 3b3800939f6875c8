"""Which options apply to which mode. One that does not is refused, not ignored.

An option counts as set when the user gave it a value other than the default: a saved config holds
every key, and must run again as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import value_of, value_text
from lora_moe_rl.data.rows import SUFFIXES
from lora_moe_rl.errors import ConfigError


def _is_hub_data(config: RunConfig) -> bool:
    """True when data.path names a data set of the hub: it looks like no path, whether or not such a
    file is there."""
    path = config.data.path
    return not (path is None or path.startswith(("/", ".", "~")) or path.endswith(SUFFIXES))


class _Rule(NamedTuple):
    """`option` has an effect only when `applies`; `decider` is the setting that decides."""

    option: str
    applies: Callable[[RunConfig], bool]
    decider: str
    when: str


_RULES = [
    *(
        _Rule(key, lambda c: c.replay.mode == "r3", "replay.mode", "with replay.mode=r3")
        for key in ("replay.missing", "replay.audit", "replay.compare_every")
    ),
    _Rule(
        "replay.audit_samples",
        lambda c: c.replay.audit > 0,
        "replay.audit",
        "with replay.audit > 0",
    ),
    _Rule("data.split", _is_hub_data, "data.path", "to a hub data set"),
    _Rule("data.subset", _is_hub_data, "data.path", "to a hub data set"),
    *(
        _Rule(
            option,
            lambda c: c.refit.mode == "adapter",
            "refit.mode",
            "with refit.mode=adapter",
        )
        for option in ("refit.slots", "rollout.fully_sharded")
    ),
    *(
        _Rule(
            option,
            lambda c: c.refit.mode == "merged",
            "refit.mode",
            "with refit.mode=merged",
        )
        for option in ("refit.rounding", "refit.warn_lost", "refit.stop_lost")
    ),
    _Rule(
        "refit.directory",
        lambda c: c.refit.transport == "directory",
        "refit.transport",
        "with refit.transport=directory",
    ),
    _Rule("rollout.ep", lambda c: c.rollout.tp > 1, "rollout.tp", "with rollout.tp above 1"),
    _Rule(
        "rollout.fully_sharded",
        lambda c: c.rollout.tp > 1,
        "rollout.tp",
        "with rollout.tp above 1",
    ),
    _Rule(
        "trainer.gpus_per_rank", lambda c: c.trainer.device != "cpu", "trainer.device", "on cuda"
    ),
]


def check_applicable(config: RunConfig) -> None:
    """Raises ConfigError naming an option that has no effect, and the setting that makes it so."""
    if config.data.path is not None and config.data.generator is not None:
        raise ConfigError(
            f"data.path={config.data.path} and data.generator={config.data.generator} are both "
            f"set; prompts come from one of them: set the other to null"
        )
    for rule in _RULES:
        if _set_by_user(config, rule.option) and not rule.applies(config):
            value = value_text(value_of(config, rule.option))
            decider = value_text(value_of(config, rule.decider))
            raise ConfigError(
                f"{rule.option}={value} has no effect with {rule.decider}={decider}: "
                f"it applies only {rule.when}"
            )


def _set_by_user(config: RunConfig, name: str) -> bool:
    path, _, last = name.rpartition(".")
    section = value_of(config, path)
    default = type(section).model_fields[last].default
    return last in section.model_fields_set and getattr(section, last) != default
