"""Things of which there is one more by writing one more file: algorithms and what they are made of,
environments, trackers.

A plug-in is the one subclass of its kind's base that a file of the kind's package defines; its name
is the file's. One's own is named `module:Class` or `file.py:Class`. Its `Settings` are the keys of
the config section that chooses it. Importing this file imports none of them.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import create_model
from pydantic.fields import FieldInfo

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import load_function

if TYPE_CHECKING:
    from lora_moe_rl.config import RunConfig


class Plugin:
    """Base of all that a file brings. `composed`: its settings are also those of the parts that
    they choose, and `read` judges them."""

    Settings: ClassVar[type[Any]]
    composed: ClassVar[bool] = False

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Any:
        """Validated settings of the config section that chose this plug-in."""
        return cls.Settings.model_validate(dict(value))


@dataclass(frozen=True)
class Kind:
    """`package` holds the files; `base` is a module of it and the class that all derive from; `key`
    is the config key that names one, or `several`, separated by commas."""

    package: str
    base: tuple[str, str]
    key: str
    several: bool = False

    @cache  # noqa: B019 (there are a few kinds, made once)
    def names(self) -> tuple[str, ...]:
        """The plug-ins of the package: its modules but for the base and packages."""
        found = pkgutil.iter_modules(import_module(self.package).__path__)
        return tuple(sorted(m.name for m in found if not m.ispkg and m.name != self.base[0]))

    @cache  # noqa: B019
    def find(self, name: str, more: tuple[str, ...] = ()) -> type[Any]:
        """The class of a plug-in. Raises ConfigError when there is none of that name, and tells the
        nearest of all and of `more`, which may stand in its place."""
        base = getattr(import_module(f"{self.package}.{self.base[0]}"), self.base[1])
        if ":" in name:
            found = load_function(name)
            if not (isinstance(found, type) and issubclass(found, base)):
                raise ConfigError(
                    f"{self.key}={name} is {found!r}, which is no subclass of "
                    f"{base.__module__}.{base.__name__}"
                )
            return found
        if name not in self.names():
            every = (*self.names(), *more)
            near = difflib.get_close_matches(name, every, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"{self.key}={name!r} is none of {', '.join(every)}{hint}; one of your own "
                "is named module:Class or file.py:Class"
            )
        module = import_module(f"{self.package}.{name}")
        own = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__
        ]
        assert len(own) == 1, f"{module.__name__} must define one {base.__name__}, found {own}"
        return own[0]

    def ones(self, value: str) -> list[str]:
        """The names in a value of the key."""
        return value.split(",") if self.several else [value]

    def chosen(self, value: str) -> list[type[Any]]:
        """The classes that a value of the key names. Raises ConfigError for one that is there
        twice, and for none beside others."""
        if not self.several:
            return [self.find(value)]
        names = [name.strip() for name in self.ones(value)]
        for name in names:
            if names.count(name) > 1 or (name == "none" and len(names) > 1):
                raise ConfigError(
                    f"{self.key}={value}: {name} cannot be one of several, or is there twice"
                )
        return [self.find(name) for name in names]


@cache
def settings_together(key: str, plugins: tuple[type[Plugin], ...]) -> type[Any]:
    """The settings of several plug-ins that one config section chooses. A key that two of them have
    is one: raises ConfigError when it is not the same for both."""
    seen: dict[str, tuple[str, FieldInfo]] = {}
    for plugin in plugins:
        for name, field in plugin.Settings.model_fields.items():
            other, known = seen.setdefault(name, (plugin.__name__, field))
            if (known.annotation, known.default) != (field.annotation, field.default):
                raise ConfigError(
                    f"{key}: {other} and {plugin.__name__} both have the setting {name}, and it is "
                    "not the same for them; choose one of them"
                )
    own = list(dict.fromkeys(plugin.Settings for plugin in plugins))
    # A base whose own bases are among the others would come before them.
    bases = [one for one in own if not any(issubclass(o, one) and o is not one for o in own)]
    return create_model("Settings", __base__=tuple(bases))


ALGORITHMS = Kind("lora_moe_rl.algorithms", ("base", "Algorithm"), "algorithm.name")
# What most algorithms are put together from: `{key of the section algorithm: kind}`.
PARTS = {
    "advantage": Kind(
        "lora_moe_rl.algorithms.advantages", ("base", "Advantage"), "algorithm.advantage"
    ),
    "loss": Kind("lora_moe_rl.algorithms.losses", ("base", "PolicyLoss"), "algorithm.loss"),
    "correction": Kind(
        "lora_moe_rl.algorithms.corrections", ("base", "Correction"), "algorithm.correction"
    ),
    "rejection": Kind(
        "lora_moe_rl.algorithms.rejections",
        ("base", "Rejection"),
        "algorithm.rejection",
        several=True,
    ),
}
ENVIRONMENTS = Kind("lora_moe_rl.environments", ("base", "Environment"), "environment.name")
TRACKERS = Kind("lora_moe_rl.telemetry.trackers", ("base", "Tracker"), "tracker.name", several=True)
KINDS = {kind.key.removesuffix(".name"): kind for kind in (ALGORITHMS, ENVIRONMENTS, TRACKERS)}


def own_files(config: RunConfig) -> list[Path]:
    """The files of one's own plug-ins that a config names: whoever reads the config needs them."""
    named = [(kind, getattr(config, section).name) for section, kind in KINDS.items()]
    named += [(kind, getattr(config.algorithm, part, "")) for part, kind in PARTS.items()]
    every = [one for kind, value in named if isinstance(value, str) for one in kind.ones(value)]
    places = [one.strip().rpartition(":")[0] for one in every]
    return [Path(place) for place in dict.fromkeys(places) if place.endswith(".py")]


def choices(section: str) -> dict[str, type[Any]]:
    """`{name: settings}` of the plug-ins that a section chooses among, and of their parts under
    `part=name`; empty for other sections."""
    if section not in KINDS:
        return {}
    found = {name: KINDS[section].find(name).Settings for name in KINDS[section].names()}
    if section == "algorithm":
        for part, kind in PARTS.items():
            found |= {f"{part}={name}": kind.find(name).Settings for name in kind.names()}
    return found
