"""Patterns that give some sites another rank or alpha.

A pattern is a glob on the module (`experts.*`, `q_proj`), alone or behind the layers it is for:
`layers.3.q_proj`, `layers.0-3.*`, `layers.*.o_proj`. Of those that match a site the last counts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from lora_moe_rl.errors import ConfigError

_LAYERS = re.compile(r"layers\.(?:(\*)|(\d+)(?:-(\d+))?)\.(.+)")


class Place(Protocol):
    """What a pattern looks at: a global layer and a canonical module name."""

    @property
    def layer(self) -> int: ...
    @property
    def module(self) -> str: ...


@dataclass(frozen=True)
class Pattern:
    """`module` is a glob; `layers` the first and last global layer, or None for all."""

    module: str
    layers: tuple[int, int] | None

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Raises ValueError for a text that begins as a layer pattern and is none."""
        if not text.startswith("layers."):
            return cls(text, None)
        match = _LAYERS.fullmatch(text)
        if match is None:
            raise ValueError("write layers.3.q_proj, layers.0-3.* or layers.*.q_proj")
        every, first, last, module = match.groups()
        if every:
            return cls(module, None)
        span = (int(first), int(last or first))
        if span[0] > span[1]:
            raise ValueError(f"its layers run from {span[0]} to {span[1]}: write the lower first")
        return cls(module, span)

    def matches(self, place: Place) -> bool:
        in_layers = self.layers is None or self.layers[0] <= place.layer <= self.layers[1]
        return in_layers and fnmatchcase(place.module, self.module)


class Values[T]:
    """The values of one option's patterns (`option`: `adapter.rank_pattern`).

    Raises ConfigError for a key that is no pattern.
    """

    def __init__(self, option: str, values: Mapping[str, T]):
        self.option = option
        self.values = [(key, self._parse(key, value), value) for key, value in values.items()]

    def _parse(self, key: str, value: T) -> Pattern:
        try:
            return Pattern.parse(key)
        except ValueError as error:
            raise ConfigError(f"{self.option}: {key!r}: {value} is no pattern: {error}") from error

    def of(self, place: Place, default: T) -> T:
        found = [value for _, pattern, value in self.values if pattern.matches(place)]
        return found[-1] if found else default

    def require_used(self, places: Sequence[Place]) -> None:
        """Raises ConfigError for a pattern that matches none of `places`."""
        for key, pattern, value in self.values:
            if not any(pattern.matches(place) for place in places):
                raise ConfigError(
                    f"{self.option}: {key!r}: {value} matches no adapted linear of this model; "
                    f"{_hint(pattern, places)}"
                )


def _hint(pattern: Pattern, places: Sequence[Place]) -> str:
    layers = [place.layer for place in places if fnmatchcase(place.module, pattern.module)]
    if layers:
        return f"{pattern.module} is adapted in layers {min(layers)} to {max(layers)}"
    modules = list(dict.fromkeys(place.module for place in places))
    names = [*modules, *dict.fromkeys(f"{m.partition('.')[0]}.*" for m in modules if "." in m)]
    close = difflib.get_close_matches(pattern.module, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"adapted are {', '.join(modules)}"
