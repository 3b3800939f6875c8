"""Checks that what we touch of other packages' internals is still as we know it.

A mend of an upstream package names the versions it was written against and what it relies on. If
either has changed it must refuse to start: a mend that no longer fits would fail silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lora_moe_rl.errors import ConfigError


def require_version(package: str, found: str, known: tuple[str, ...], who: str) -> None:
    """Raises ConfigError when `found` (without its local part, as in 1.2+cpu) is not in `known`."""
    if found.split("+")[0] not in known:
        raise ConfigError(
            f"{who} knows {package} {' and '.join(known)}, but {found} is installed; install a "
            f"known version, or check the upstream code and add the version in {who}"
        )


def require_parameters(function: Callable[..., Any], names: tuple[str, ...], who: str) -> None:
    """Raises ConfigError unless the parameters of `function` begin with `names`."""
    found = tuple(inspect.signature(function).parameters)
    if found[: len(names)] != names:
        raise ConfigError(
            f"{who} expects {function.__module__}.{function.__qualname__} to take {names}, but it "
            f"takes {found}: the upstream code has changed"
        )


def require_attributes(thing: Any, names: tuple[str, ...], who: str) -> None:
    """Raises ConfigError naming the attributes that `thing` lacks."""
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        label = thing.__name__ if inspect.isclass(thing) else type(thing).__name__
        raise ConfigError(
            f"{who} expects {label} to have {', '.join(missing)}: the upstream code has changed"
        )
