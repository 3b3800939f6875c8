"""Things of which there is one more by writing one more file: algorithms, environments, trackers.

A plug-in is the one subclass of its kind's base that a file of the kind's package defines; its name
is the file's. One's own is named `module:Class` or `file.py:Class`. Its `Settings` are the keys of
the config section that chooses it. Importing this file imports none of them.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from lora_moe_rl.config.importing import load_function
from lora_moe_rl.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """`package` holds the files; `base` is a module of it and the class that all derive from; `key`
    is the config key that names one."""

    package: str
    base: tuple[str, str]
    key: str

    @cache  # noqa: B019 (there are three kinds, made once)
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
            raise ConfigError(
                f"{self.key}={name!r} is none of {', '.join(self.names())}; one of your own is "
                "named module:Class or file.py:Class"
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
ENVIRONMENTS = Kind("lora_moe_rl.environments", ("base", "Environment"), "environment.name")
TRACKERS = Kind("lora_moe_rl.telemetry.trackers", ("base", "Tracker"), "tracker.name")
KINDS = {kind.key.removesuffix(".name"): kind for kind in (ALGORITHMS, ENVIRONMENTS, TRACKERS)}
