"""User functions by name: 'module:function' or 'path/file.py:function'.

Rewards and generators are named so, because a name (unlike a function) reaches any process.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lora_moe_rl.errors import ConfigError


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `spec` names. Raises ConfigError that says what cannot be had, and why."""
    place, name = split_spec(spec)
    module = load_file(Path(place)) if place.endswith(".py") else _load_module(place, spec)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{spec!r}: {place} has no {part!r}; {_functions_of(module, part)}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{spec!r}: {name} is a {type(target).__name__}, not a function")
    return target


def split_spec(spec: str) -> tuple[str, str]:
    """The module or file, and the function. Raises ConfigError."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{spec!r} is not of the form module:function or file.py:function")
    return place, name


def absolute_spec(spec: str) -> str:
    """`spec` with its file, if it names one, as an absolute path: good in any directory."""
    place, name = split_spec(spec)
    if not place.endswith(".py"):
        return spec
    path = Path(place).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"{spec!r}: there is no file {path}")
    return f"{path}:{name}"


def load_file(path: Path) -> ModuleType:
    """The Python file at `path` as a module; loaded once in a process. Raises ConfigError."""
    path = path.expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"cannot import {path}: there is no such file")
    # The name holds a hash of the path: two files of one name are two modules.
    name = f"lora_moe_rl_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    # As for `python file.py`: what lies beside it can be imported.
    _append_to_path(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"cannot import {path}: {_reason(error, str(path))}") from error
    return module


def _load_module(name: str, spec: str) -> ModuleType:
    _append_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{spec!r}: there is no module {error.name!r} in {Path.cwd()} or in this "
                f"environment; install it, or name a file: path/to/file.py:function"
            ) from error
        raise ConfigError(f"{spec!r}: importing {name} failed: {_reason(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{spec!r}: importing {name} failed: {_reason(error)}") from error


def _append_to_path(folder: Path) -> None:
    # At the end: a user's file must not shadow an installed package.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _reason(error: BaseException, path: str | None = None) -> str:
    """The error and the line of the user's file that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def _functions_of(module: ModuleType, wanted: str) -> str:
    """What a module is for, by its own word (`__all__`) or else its own functions, and the one that
    may have been meant."""
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    names = sorted(getattr(module, "__all__", own))
    close = difflib.get_close_matches(wanted, names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}It has {', '.join(names)}" if names else "it defines no function"
