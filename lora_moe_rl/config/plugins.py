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
from typing import Any, ClassVar

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import load_function


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
    is the config key that names one."""

    package: str
    base: tuple[str, str]
    key: str

    @cache  # noqa: B019 (there are a few kinds, made once)
    def names(self) -> tuple[str, ...]:
        """The plug-ins of the package: its modules but for the base and packages."""
        found = pkgutil.iter_modules(import_module(self.package).__path__)
        return tuple(sorted(m.name for m in found if not m.ispkg and m.name != self.base[0]))

    @cache  # noqa: B019
    def find(self, name: str) -> type[Any]:
        """The class of a plug-in. Raises ConfigError when there is none of that name."""
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
            near = difflib.get_close_matches(name, self.names(), n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"{self.key}={name!r} is none of {', '.join(self.names())}{hint}; one of your own "
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
        "lora_moe_rl.algorithms.rejections", ("base", "Rejection"), "algorithm.rejection"
    ),
}
ENVIRONMENTS = Kind("lora_moe_rl.environments", ("base", "Environment"), "environment.name")
TRACKERS = Kind("lora_moe_rl.telemetry.trackers", ("base", "Tracker"), "tracker.name")
KINDS = {kind.key.removesuffix(".name"): kind for kind in (ALGORITHMS, ENVIRONMENTS, TRACKERS)}


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
