"""What is left of settings when something else is chosen over them.

A saved config holds every key, and what `algorithm=grpo` has by default looks chosen there: laid
under `algorithm=gspo` as it stands, it would be grpo by another name. So where a later layer
chooses another algorithm, a part of one, an environment or a tracker, the settings below it that
were at the old choice's defaults go, and those that the new one has not. An algorithm that samples
nothing, chosen over one that does, has none of the sections about it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

from pydantic import ValidationError

from lora_moe_rl.config.offline import KEYS, SAMPLED, SAMPLING, SHARED
from lora_moe_rl.config.plugins import KINDS, PARTS
from lora_moe_rl.config.schema import RunConfig
from lora_moe_rl.config.section import Section
from lora_moe_rl.errors import ConfigError


def chosen_over(
    lower: dict[str, Any], layer: Mapping[str, Any], kept: Collection[tuple[str, str]]
) -> None:
    """Takes from `lower` what goes when `layer` is laid over it. `kept`: (section, key) that stay,
    whatever their values."""
    if _ends_sampling(lower, layer):
        _drop_sampling(lower, kept)
    for section in KINDS:
        mine, chosen = lower.get(section), layer.get(section)
        if isinstance(mine, dict) and isinstance(chosen, Mapping):
            for key in _going(section, mine, chosen):
                if (section, key) not in kept:
                    del mine[key]


def _ends_sampling(lower: Mapping[str, Any], layer: Mapping[str, Any]) -> bool:
    chosen = layer.get("algorithm")
    if not isinstance(chosen, Mapping) or "name" not in chosen:
        return False
    try:
        before = RunConfig.model_validate({"algorithm": lower.get("algorithm", {})})
        return not before.offline and RunConfig(algorithm={"name": chosen["name"]}).offline
    except (ValidationError, ConfigError):  # what is laid over may mend it
        return False


def _drop_sampling(lower: dict[str, Any], kept: Collection[tuple[str, str]]) -> None:
    """Takes out all that says how to sample and to score."""
    gone = [(section, key) for section in SAMPLING for key in lower.get(section, ())]
    gone += [("algorithm", key) for key in (*KEYS, "group_size")]
    gone += [("model", key) for key in SHARED] + [("eval", "prompts_at_once")]
    for section, key in gone:
        if (section, key) not in kept:
            lower.get(section, {}).pop(key, None)
    for section, keys in (("eval", SAMPLED), ("data", ("reward",))):
        if (section, "sets") not in kept:
            sets = lower.get(section, {}).get("sets") or {}
            for one, key in product(filter(None, sets.values()), keys):
                one.pop(key, None)


def _going(section: str, lower: Mapping[str, Any], layer: Mapping[str, Any]) -> list[str]:
    choices = ("name", *(PARTS if section == "algorithm" else ()))
    chosen = {key: layer[key] for key in choices if key in layer}
    if not chosen or (old := _settings(section, lower)) is None:  # what is laid over may mend it
        return []
    if all(getattr(old, key, one) == one for key, one in chosen.items()):
        return []
    fields, stood_for = type(old).model_fields, old.stood_for()
    at_default = {
        key
        for key in lower.keys() & fields.keys() - {"name"}
        if getattr(old, key) == stood_for.get(key, fields[key].default)
    }
    kept = {key: lower[key] for key in choices if key in lower.keys() - at_default}
    new = _settings(section, kept | chosen)
    gone = set() if new is None else lower.keys() - type(new).model_fields.keys()
    return sorted(at_default | gone)


def _settings(section: str, given: Mapping[str, Any]) -> Section | None:
    """As they are validated; None where they are refused."""
    try:
        return getattr(RunConfig.model_validate({section: dict(given)}), section)
    except (ValidationError, ConfigError):
        return None
