"""The keys of RunConfig as a flat table: for looking one up, naming the nearest, and `--help`."""

from __future__ import annotations

import difflib
import json
import operator
import types
import typing
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import BaseModel

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import choices


@dataclass(frozen=True)
class Key:
    """One option: `name` is dotted (`adapter.rank`), `annotation` its type. `owners`: the plug-ins
    that have it so, empty for all."""

    name: str
    annotation: Any
    default: Any
    sentence: str
    owners: tuple[str, ...] = ()

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
    found: dict[str, Key] = {}
    for key in _walk(RunConfig, ""):
        found.setdefault(key.name, key)
    return found


@cache
def of_other_plugins() -> dict[str, list[Key]]:
    """The keys that plug-ins have with other defaults or sentences than in `all_keys`, by name."""
    found: dict[str, list[Key]] = {}
    for key in _walk(RunConfig, ""):
        if key != all_keys()[key.name]:
            found.setdefault(key.name, []).append(key)
    return found


@cache
def sections() -> dict[str, str]:
    """The sections, by dotted name, each with its sentence; '' is the top."""
    found = {"": "The run."}
    _collect_sections(RunConfig, "", found)
    return found


@cache
def named_sections() -> dict[str, type[BaseModel]]:
    """The keys whose value is a map of sections that the user names (`data.sets`), each with what
    such a section is."""
    found = ((key.name, _section_of_map(key.annotation)) for key in all_keys().values())
    return {name: section for name, section in found if section is not None}


@cache
def member_keys() -> dict[str, Key]:
    """Every key of a section that the user names, which is NAME here: `data.sets.NAME.path`."""
    return {
        key.name: key
        for name, section in named_sections().items()
        for key in _walk(section, f"{name}.NAME.")
    }


def find_key(name: str) -> Key | None:
    """The key of a dotted name, also in a section that the user named; None for what is none."""
    return all_keys().get(name) or member_keys().get(generic(name))


def map_around(name: str) -> str | None:
    """The key whose value is a free map, of which a dotted name is an entry: `data.args` for
    `data.args.level`."""
    parts = name.split(".")
    heads = (".".join(parts[:end]) for end in range(1, len(parts)))
    found = ((head, find_key(head)) for head in heads)
    return next((head for head, key in found if key and key.annotation == dict[str, Any]), None)


def is_section(name: str) -> bool:
    """Whether a dotted name is that of a section, of a map of sections, or of one that the user
    named."""
    return name in sections() or name in named_sections() or is_member(name)


def is_member(name: str) -> bool:
    """Whether a dotted name is that of a section that the user named: `data.sets.math`."""
    head, _, last = name.rpartition(".")
    return head in named_sections() and bool(last)


def generic(name: str) -> str:
    """A dotted name with NAME for what the user named: `data.sets.math.path` becomes
    `data.sets.NAME.path`."""
    for head in named_sections():
        if name.startswith(f"{head}."):
            _, dot, rest = name.removeprefix(f"{head}.").partition(".")
            return f"{head}.NAME{dot}{rest}"
    return name


def nearest(name: str) -> list[str]:
    """The keys that may have been meant by `name`: `adapter.rnk`, `lr`, `tp` or `adapter-rank`."""
    if (inside := generic(name)) != name:
        return difflib.get_close_matches(inside, list(member_keys()), n=1, cutoff=0.6)
    names = list(all_keys())
    same_end = [key for key in names if key.rpartition(".")[2] == name.rpartition(".")[2]]
    close = difflib.get_close_matches(name.replace("-", "_"), same_end or names, n=1, cutoff=0.6)
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
    return value if isinstance(value, str) else json.dumps(value, default=_set_values)


def _set_values(section: BaseModel) -> dict[str, Any]:
    return section.model_dump(exclude_unset=True)


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
        return f"list of {type_text(typing.get_args(part)[0])}"
    if typing.get_origin(part) is typing.Annotated:
        return _one_type_text(typing.get_args(part)[0])
    if (section := _section_of_map(part)) is not None:
        return f"map of names to {', '.join(section.model_fields)}"
    if typing.get_origin(part) is dict:
        return "map of {} to {}".format(*(type_text(arg) for arg in typing.get_args(part)))
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
    """The keys that the plug-ins of a section add to those that all have, or have otherwise: one
    for each default and description."""
    presets = {one for one in choices(section) if "=" not in one}
    for name, kinds in _kinds(section).items():
        of_all = common.model_fields.get(name)
        parts = {one for kind in kinds for one in kind.owners if "=" in one}
        for kind in kinds:
            if of_all and (kind.default, kind.sentence) == (of_all.default, of_all.description):
                continue
            owners = tuple(one for one in kind.owners if one in parts or not parts)
            if set(owners) == presets:
                yield replace(kind, owners=())
            elif owners:
                sentence = f"({', '.join(owners)}) {kind.sentence}"
                yield replace(kind, sentence=sentence, owners=owners)


def _kinds(section: str) -> dict[str, list[Key]]:
    """The settings of a section's plug-ins by name, each once for each default and description."""
    found: dict[str, dict[tuple[str, str], Key]] = {}
    for plugin, settings in choices(section).items():
        for name, field in settings.model_fields.items():
            sentence = field.description or ""
            kinds = found.setdefault(name, {})
            known = kinds.get((repr(field.default), sentence))
            owners = (*(known.owners if known else ()), plugin)
            key = Key(f"{section}.{name}", field.annotation, field.default, sentence, owners)
            kinds[repr(field.default), sentence] = key
    return {name: list(kinds.values()) for name, kinds in found.items()}


def _collect_sections(model: type[BaseModel], prefix: str, found: dict[str, str]) -> None:
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            found[prefix + name] = field.description or ""
            _collect_sections(field.annotation, f"{prefix}{name}.", found)


def _section_of_map(annotation: Any) -> type[BaseModel] | None:
    """The section of which `annotation` is a map by name, if it is one."""
    arguments = typing.get_args(annotation)
    is_map = typing.get_origin(annotation) is dict and _is_section(arguments[1])
    return arguments[1] if is_map else None


def _is_section(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
