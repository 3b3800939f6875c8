"""Command-line settings onto a RunConfig: `a.b=v`, `--a.b v`, `--a.b=v` and `@file.yaml`.

The result is a new, validated RunConfig. Later settings win over earlier ones, and all of them over
what the recipe set. Nothing is ignored: an unknown key is an error that names the nearest, and a
key that does not apply to the chosen mode is an error that names both.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel, ValidationError

from lora_moe_rl.config import RunConfig, aliases
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.config.choosing import chosen_over
from lora_moe_rl.config.files import read_config_file, without_twins
from lora_moe_rl.config.keys import (
    Key,
    all_keys,
    find_key,
    generic,
    is_member,
    is_section,
    map_around,
    member_keys,
    named_sections,
    nearest,
)
from lora_moe_rl.config.plugins import KINDS, choices
from lora_moe_rl.config.section import NoNumber, Section
from lora_moe_rl.errors import ConfigError

BARE_LIST = re.compile(r"\[[^][(){}\"']*\]")  # [file.py:function, module:function]

TEXTS = ("rollout.stop",)  # lists whose members may have brackets of their own


def override(config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """`config` with `arguments` laid over it, validated as a whole. Raises ConfigError."""
    return _laid_over(config, parse_arguments(arguments))


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """`config` with nested `settings` laid over it, as they come from a file."""
    return _laid_over(config, [FromFile(checked_keys(settings))])


def _laid_over(config: RunConfig, layers: Sequence[dict[str, Any]]) -> RunConfig:
    # Only what was set: so that a key counts as set by the user or not.
    merged = config.model_dump(exclude_unset=True)
    single: set[tuple[str, str]] = set()  # of settings that were made one by one
    for layer in layers:
        chosen_over(merged, layer, single)
        _merge(merged, layer)
        if not isinstance(layer, FromFile):
            sections = {name: one for name, one in layer.items() if isinstance(one, Mapping)}
            single |= {(name, key) for name, one in sections.items() for key in one}
    try:
        result = RunConfig.model_validate(merged)
    except ValidationError as error:
        raise readable(error) from error
    check_applicable(result)
    return result


def parse_arguments(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """One nested dict of settings for each argument, in order."""
    layers, unknown = [], []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("@"):
            layers.append(FromFile(checked_keys(read_config_file(Path(argument[1:])))))
            continue
        name, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            if not argument.startswith("--"):
                raise ConfigError(f"{argument!r} is not a setting: write key=value or --key value")
            valued = bool(rest) and not rest[0].startswith("--")
            if _known(name) and not valued:
                raise ConfigError(f"--{name} needs a value: --{name} VALUE")
            text = rest.pop(0) if valued else ""
        if not _known(name):
            unknown.append(name)
            continue
        key = find_key(name)
        value = parse_value(key, text) if key else parse_loosely(text)
        if value is None and is_section(name):
            _require_removable(name)
        layers.append(checked_keys({name: value}))
    if unknown:
        given: dict[str, Any] = {}
        for layer in layers:
            _merge(given, layer)
        raise _unknown(*unknown, *_of_no_plugin(given, ""))
    return layers


def parse_value(key: Key, text: str) -> Any:
    """The value that `text` stands for, by the type of `key`. What it cannot be is left as text,
    for the validation to name."""
    if key.accepts_none and text.lower() in ("null", "none"):
        return None
    if key.is_tuple:
        return _list_of(key, text)
    if key.accepts_text:
        return parse_loosely(text) if text[:1] == '"' else text
    return parse_loosely(text)


def _list_of(key: Key, text: str) -> Any:
    """`a,b`, `[a, b]`, JSON, or null for none."""
    if text.lower() in ("null", "none"):
        return ()
    value = parse_loosely(text) if text[:1] in ("[", "(", '"') else _split(text)
    if value == text and BARE_LIST.fullmatch(text):
        if key.name in TEXTS:
            quoted = json.dumps([text])
            raise ConfigError(
                f"{key.name}={text} may be a list or a text in brackets; as a text it is "
                f"'{key.name}={quoted}'"
            )
        return _split(text[1:-1])
    if isinstance(value, str) and value != text:  # one in quotes
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def parse_loosely(text: str) -> Any:
    """JSON, else a Python literal, else the text itself. Raises ConfigError for a key that stands
    twice."""
    for parse in (partial(json.loads, object_pairs_hook=without_twins), ast.literal_eval):
        try:
            return parse(text)
        except ConfigError:
            raise
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


def checked_keys(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`settings` with unknown keys refused, and `model: NAME` written out as `model: {path: NAME}`.

    Dotted keys (`adapter.rank: 8`) are accepted in files too.
    """
    result: dict[str, Any] = {}
    if unknown := _unknown_in(settings, prefix):
        raise _unknown(*unknown, *_of_no_plugin(settings, prefix))
    for part, value in settings.items():
        name = f"{prefix}{part}"
        if is_section(name):
            value = _section_value(name, value)
        within = str(part)
        if (around := map_around(name)) is not None:
            value = Entry({name.removeprefix(f"{around}."): value})
            within = around.removeprefix(prefix)
        head, *tail = within.split(".")
        for step in reversed(tail):
            value = {step: value}
        _merge(result, {head: value}, prefix)
    return result


class FromFile(dict):
    """Settings of a file, which may hold every key there is: that one stands there says little."""


class Entry(dict):
    """A map of which one entry was set by its own dotted name (`data.args.level=3`): it is laid
    over what is there, where a map that was set as a whole replaces it."""


def _section_value(name: str, value: Any) -> dict[str, Any] | None:
    """None stands for sections that the user named, and which are to be taken away."""
    if value is None and (name in named_sections() or is_member(name)):
        return None
    if isinstance(value, str):
        # model=NAME, algorithm=NAME, reward.functions.right=m:f
        for short in ("path", "name", "function"):
            if find_key(f"{name}.{short}") is not None and (short != "name" or choices(name)):
                value = {short: value}
                break
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        own = [key for key in all_keys() | member_keys() if key.startswith(f"{generic(name)}.")]
        keys = ", ".join(own)
        raise ConfigError(f"{name}={value!r}: {name} is a section; set one of its keys: {keys}")
    return checked_keys(value, f"{name}.")


def _require_removable(name: str) -> None:
    """Raises ConfigError for a section that is always there, and which null would not take away."""
    if name not in named_sections() and not is_member(name):
        maps = [one for one in named_sections() if one.startswith(f"{name}.")]
        ways = "; ".join(f"{one}=null takes {one} away" for one in maps) or "set its keys"
        raise ConfigError(f"{name}=null: {name} is a section, which stays; {ways}")


def _merge(into: dict[str, Any], layer: Mapping[str, Any], prefix: str = "") -> None:
    """Lays `layer` over `into`, section by section. A map that is a value is replaced as a whole:
    the order of its keys means something."""
    for key, value in layer.items():
        name = f"{prefix}{key}"
        if isinstance(value, Entry) and isinstance(into.get(key), dict):
            into[key] = type(into[key])(into[key] | value)
        elif is_section(name) and isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value, f"{name}.")
        else:
            into[key] = value


def _known(name: str) -> bool:
    """Keys of a section that chooses a plug-in are left to the validation: the plug-in may be one's
    own."""
    head, dot, _ = name.partition(".")
    chosen = bool(dot) and bool(choices(head))
    known = find_key(name) is not None or map_around(name) is not None
    return chosen or known or (name != "" and is_section(name))


def _unknown_in(settings: Mapping[str, Any], prefix: str) -> list[str]:
    found = []
    for part, value in settings.items():
        name = f"{prefix}{part}"
        if not _known(name):
            found += _ends(name, value)
        elif is_section(name) and isinstance(value, Mapping):
            found += _unknown_in(value, f"{name}.")
    return found


def _of_no_plugin(settings: Mapping[str, Any], prefix: str) -> list[str]:
    """Other tools' keys of sections that choose a plug-in, which none that is there has: told
    beside others that are unknown. Alone they are the validation's to judge, and so is any other
    key, as the plug-in may be one's own."""
    found = []
    for part, value in settings.items():
        name = f"{prefix}{part}"
        if name in KINDS and isinstance(value, Mapping) and ":" not in str(value.get("name")):
            known = {key for one in choices(name).values() for key in one.model_fields}
            for key in value.keys() - known:
                found += _ends(f"{name}.{key}", value[key])
    return sorted(end for end in found if aliases.find(end) is not None)


def _ends(name: str, value: Any) -> list[str]:
    """The dotted names of all that stands within a value: `kl_ctrl.type` of `kl_ctrl`."""
    if not isinstance(value, Mapping) or not value:
        return [name]
    return [end for part, inner in value.items() for end in _ends(f"{name}.{part}", inner)]


def _unknown(*names: str) -> ConfigError:
    """Of all at once: who comes with another tool's command line has dozens."""
    return ConfigError("\n".join(_one_unknown(name) for name in names))


def _one_unknown(name: str) -> str:
    found = aliases.find(name)
    if isinstance(found, aliases.Missing):
        return f"unknown config key {name!r}; there is none: {found.why}"
    if found is not None:
        note = f" ({found.note})" if found.note else ""
        return f"unknown config key {name!r}; here it is {found.ours}{note}"
    if find_key(name) is not None:  # of a plug-in that is not chosen
        section, _, key = name.partition(".")
        owners = [one for one, own in choices(section).items() if key in own.model_fields]
        return f"{name} is no setting of the chosen {section}: it is one of {', '.join(owners)}"
    close = nearest(name)
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else "see `lora-moe-rl train --help` for all keys"
    )
    return f"unknown config key {name!r}; {hint}"


def readable(error: ValidationError) -> ConfigError:
    """pydantic's error as ours: one line a fault, with key, value and what is allowed."""
    section = _SECTIONS.get(error.title)  # of a section that a recipe builds by itself
    within = [] if section is None else [section]
    faults = error.errors(include_url=False)
    lines = [_line(fault | {"loc": (*within, *fault["loc"])}) for fault in faults]
    if section in KINDS and any(fault["type"] == "extra_forbidden" for fault in faults):
        lines.append(
            f"{error.title} has the keys that all have; with others it is a map: "
            f'{section}={{"name": ..., ...}}'
        )
    return ConfigError("\n".join(lines))


def is_of_config(error: BaseException) -> TypeGuard[ValidationError]:
    """Whether it is pydantic's error of a config or one of its sections."""
    return isinstance(error, ValidationError) and error.title in _names_below(Section)


def _names_below(kind: type) -> set[str]:
    return {kind.__name__}.union(*(_names_below(one) for one in kind.__subclasses__()))


_SECTIONS = {type(one.default).__name__: name for name, one in RunConfig.model_fields.items()}


# What pydantic calls a fault -> how it reads behind `key=value`.
_FAULTS = {
    "value_error": "is not a number",  # NoNumber: others have a sentence of their own
    "int_parsing": "is not an integer",
    "int_type": "is not an integer",
    "int_from_float": "is not an integer",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "string_type": "is not text",
    "tuple_type": "is not a list",
    "dict_type": 'is not a map (write {{"experts.*": 8}})',
    "literal_error": "is not one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "frozen_instance": "cannot be set on a config that is made; give it to RunConfig(...) itself",
    "string_pattern_mismatch": "may hold only what matches {pattern}",
}


def _line(fault: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return str(_unknown(*_ends(name, fault["input"])))
    if fault["type"] == "value_error" and not isinstance(fault["ctx"]["error"], NoNumber):
        return str(fault["ctx"]["error"])
    if inspect.isfunction(given := fault["input"]):
        return (
            f"{name} is the function {given.__name__} itself; name it, as file.py:{given.__name__} "
            f'(f"{{__file__}}:{given.__name__}" in its own file)'
        )
    text = _FAULTS.get(fault["type"])
    if text is None:
        return f"{name}={fault['input']!r}: {fault['msg'][:1].lower()}{fault['msg'][1:]}"
    hint = _nearest_choice(fault) if fault["type"] == "literal_error" else ""
    return f"{name}={fault['input']!r} {text.format(**fault.get('ctx', {}))}{hint}"


def _nearest_choice(fault: Mapping[str, Any]) -> str:
    choices = re.findall(r"'([^']*)'", fault["ctx"]["expected"])
    near = difflib.get_close_matches(str(fault["input"]), choices, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
