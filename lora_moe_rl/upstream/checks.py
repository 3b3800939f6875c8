"""Checks that what we touch of other packages' internals is still as we know it.

A mend of an upstream package requires the version it was written against and what it relies on. If
either has changed it must refuse to start: a mend that no longer fits would fail silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.upstream import versions


def require_version(package: str, who: str) -> None:
    """Raises ConfigError unless the package is installed in the version that `who` was written
    against: that of `versions.TESTED`."""
    builds = versions.VLLM_BUILDS if package == "vllm" else (package,)
    found = next(filter(None, map(versions.installed, builds)), None)
    if found is None or not versions.is_tested(package, found):
        known = versions.TESTED[package]
        raise ConfigError(
            f"{who} knows {package} {known}, but {found or 'none'} is installed; install {known}, "
            "or check what it relies on in the other and change upstream/versions.py"
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
