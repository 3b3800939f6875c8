"""The settings of a preset and of the parts that a config chooses, as one section of the config.

A setting that several rejections have takes one value for each of them, in their order:
algorithm.rejection=sequence_mean,veto algorithm.rejection_max=1.001,1e4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from functools import cache
from typing import Any

from pydantic import Field, ValidationError, create_model

from lora_moe_rl.algorithms.parts.settings import PolicyGradientConfig, rejection_names
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.config.section import Section


@cache
def settings_class(
    name: str,
    common: type[AlgorithmConfig],
    chosen: tuple[tuple[str, str], ...],
    defaults: tuple[tuple[str, Any], ...],
) -> type[Section]:
    """The settings of a preset, `common`, with those of the chosen parts, and its defaults."""
    parts = [PARTS[kind].find(part).Settings for kind, part in chosen if kind != "rejection"]
    bases = (common, *parts, _rejection_settings(rejection_names(dict(chosen)["rejection"])))
    fields: dict[str, Any] = {}
    for key, default in defaults:
        for base in bases:
            if key in base.model_fields:
                field = copy(base.model_fields[key])
                field.default = default
                fields[key] = (field.annotation, field)
    # A base whose own bases are among the others would come before them.
    unique = [
        b for b in dict.fromkeys(bases) if not any(issubclass(o, b) and o is not b for o in bases)
    ]
    return create_model(name + "Settings", __base__=tuple(unique), **fields)


def owners_of(key: str, rejections: tuple[str, ...]) -> list[int]:
    """The places of the rejections that have a setting."""
    fields = [PARTS["rejection"].find(name).Settings.model_fields for name in rejections]
    return [place for place, has in enumerate(fields) if key in has]


def _rejection_settings(rejections: tuple[str, ...]) -> type[Section]:
    """The settings of one rejection, or of several: as they are where one has them, else a
    tuple."""
    first, *others = rejections
    if not others:
        return PARTS["rejection"].find(first).Settings
    found: dict[str, Any] = {}
    for name in rejections:
        for key in PARTS["rejection"].find(name).Settings.model_fields:
            owners = owners_of(key, rejections)
            every = [PARTS["rejection"].find(rejections[i]).Settings.model_fields for i in owners]
            if len(owners) == 1:
                found[key] = (every[0][key].annotation, every[0][key])
            else:
                defaults = tuple(fields[key].default for fields in every)
                described = Field(defaults, description=every[0][key].description)
                found[key] = (tuple[Any, ...], described)
    return create_model("RejectionSettings", __base__=Section, **found)


def split_values(value: Mapping[str, Any], rejections: tuple[str, ...]) -> dict[str, Any]:
    """`value` with one entry for each rejection where several have a setting. Raises ValueError for
    another number of them."""
    found = dict(value)
    for key, given in value.items():
        owners = owners_of(key, rejections)
        if len(owners) < 2:
            continue
        texts = given.split(",") if isinstance(given, str) else given
        entries = tuple(map(_entry, texts)) if isinstance(texts, list | tuple) else (given,)
        if len(entries) != len(owners):
            whose = ", ".join(rejections[place] for place in owners)
            raise ValueError(
                f"algorithm.{key} has {len(entries)} value{'s'[: len(entries) != 1]}, and "
                f"{len(owners)} rejections take one each ({whose}): separate them by commas, null "
                "for none"
            )
        found[key] = entries
    return found


def _entry(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def settings_of_each(settings: PolicyGradientConfig) -> list[PolicyGradientConfig]:
    """The settings as each rejection sees them. Raises ValueError for those of one that it refuses,
    and for one that says the same as another."""
    names = rejection_names(settings.rejection)
    if len(names) == 1:
        return [settings]
    found: list[PolicyGradientConfig] = []
    for place, name in enumerate(names):
        part = PARTS["rejection"].find(name).Settings
        own = {}
        for key, field in part.model_fields.items():
            owners, given = owners_of(key, names), getattr(settings, key)
            value = given if len(owners) == 1 else given[owners.index(place)]
            if key in settings.model_fields_set or value != field.default:
                own[key] = value
        found.append(settings.model_copy(update={"rejection": name, **_checked(part, own, name)}))
        if found[-1] in found[:-1]:
            raise ValueError(f"algorithm.rejection={settings.rejection} has {name} twice, alike")
    return found


def _checked(part: type[Section], own: Mapping[str, Any], name: str) -> dict[str, Any]:
    try:
        return part.model_validate(own).model_dump()
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        reason = fault.get("ctx", {}).get("error", fault["msg"])
        key = ".".join(map(str, fault["loc"]))
        said = f"{reason}" if not key else f"algorithm.{key}={fault['input']!r}: {reason}"
        raise ValueError(f"{said} (of algorithm.rejection={name})") from None
