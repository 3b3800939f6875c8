"""The keys of RunConfig as a flat table: for looking one up, naming the nearest, and `--help`."""

from __future__ import annotations

import difflib
import json
import operator
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import choices


@dataclass(frozen=True)
class Key:
    """One option: `name` is dotted (`adapter.rank`), `annotation` its type."""

    name: str
    annotation: Any
    default: Any
    sentence: str

    @property
    def accepts_text(self) -> bool:
        """True when a string is a value of this key as it stands."""
        return any(
            part is str or (typing.get_origin(part) is typing.Literal)
            for part in _alternatives(self.annotation)
        )

    @property
    def accepts_none(self) -> bool:
        return type(None) in _alternatives(self.annotation)

    @property
    def is_tuple(self) -> bool:
        return any(typing.get_origin(part) is tuple for part in _alternatives(self.annotation))


@cache
def all_keys() -> dict[str, Key]:
    """Every key, by dotted name, in the order of RunConfig."""
    return {key.name: key for key in _walk(RunConfig, "")}


@cache
def sections() -> dict[str, str]:
    """The sections, by dotted name, each with its sentence; '' is the top."""
    found = {"": "The run."}
    _collect_sections(RunConfig, "", found)
    return found


def nearest(name: str) -> list[str]:
    """The keys that may have been meant by `name`: `adapter.rnk`, `lr`, `tp` or `adapter-rank`."""
    names = list(all_keys())
    same_end = [key for key in names if key.rpartition(".")[2] == name.rpartition(".")[2]]
    close = difflib.get_close_matches(name.replace("-", "_"), same_end or names, n=1, cutoff=0.5)
    return close or same_end


def value_of(config: RunConfig, name: str, default: Any = None) -> Any:
    """The value of a key, or a section, by its dotted name; `default` for one that belongs to
    another plug-in than the config's."""
    try:
        return operator.attrgetter(name)(config)
    except AttributeError:
        return default


def value_text(value: Any) -> str:
    """A value as a user writes it: text without quotes, all else as JSON (null, true, [1, 2])."""
    return value if isinstance(value, str) else json.dumps(value)


def type_text(annotation: Any) -> str:
    """A type as a user reads it: `int or null`, `off, r2 or r3`, `list of str`."""
    parts = _alternatives(annotation)
    return " or ".join(_one_type_text(part) for part in parts)


def _one_type_text(part: Any) -> str:
    if part is type(None):
        return "null"
    if typing.get_origin(part) is typing.Literal:
        values = [str(value) for value in typing.get_args(part)]
        return " or ".join([", ".join(values[:-1]), values[-1]]) if values[1:] else values[0]
    if typing.get_origin(part) is tuple:
        return f"list of {_one_type_text(typing.get_args(part)[0])}"
    if typing.get_origin(part) is typing.Annotated:
        return _one_type_text(typing.get_args(part)[0])
    if typing.get_origin(part) is dict:
        return "map of {} to {}".format(*(_one_type_text(arg) for arg in typing.get_args(part)))
    return "true or false" if part is bool else part.__name__


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _walk(model: type[BaseModel], prefix: str) -> typing.Iterator[Key]:
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            yield from _walk(field.annotation, f"{prefix}{name}.")
            yield from _walk_choices(f"{prefix}{name}", field.annotation)
        else:
            sentence = field.description or ""
            yield Key(prefix + name, field.annotation, field.default, sentence)


def _walk_choices(section: str, common: type[BaseModel]) -> typing.Iterator[Key]:
    """The keys that each plug-in of a section adds to those that all have."""
    owners: dict[str, list[str]] = {}
    fields: dict[str, FieldInfo] = {}
    for plugin, settings in choices(section).items():
        for name, field in settings.model_fields.items():
            if name not in common.model_fields:
                owners.setdefault(name, []).append(plugin)
                fields.setdefault(name, field)
    for name, field in fields.items():
        whose = [one for one in owners[name] if "=" in one] or owners[name]
        sentence = field.description or ""
        if set(whose) != {one for one in choices(section) if "=" not in one}:
            sentence = f"({', '.join(whose)}) {sentence}"
        yield Key(f"{section}.{name}", field.annotation, field.default, sentence)


def _collect_sections(model: type[BaseModel], prefix: str, found: dict[str, str]) -> None:
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            found[prefix + name] = field.description or ""
            _collect_sections(field.annotation, f"{prefix}{name}.", found)


def _is_section(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
