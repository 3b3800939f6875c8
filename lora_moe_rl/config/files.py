"""Configs as text: YAML, JSON and TOML in, YAML out."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.offline import SAMPLING
from lora_moe_rl.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json", ".toml")


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"  # of `<<`


class _Loader(yaml.SafeLoader):
    """Scalars as in YAML 1.2: `off` is text (replay.mode: off), and 1e-4 is a number. A key that
    stands twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        names = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        try:
            without_twins([(key.value, None) for key in names if key.tag != _MERGE])
        except ConfigError as error:
            raise yaml.constructor.ConstructorError(
                None, None, str(error), node.start_mark
            ) from error
        return super().construct_mapping(node, deep=deep)


def without_twins(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The pairs as a dict. Raises ConfigError when a key stands twice, of which a dict would keep
    the last and say nothing."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key {key!r} stands twice in one map")
        found[key] = value
    return found


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in (_BOOL, _FLOAT)]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML, JSON or TOML file, as nested dicts. Raises ConfigError."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is not a config file: its name must end in {_listed()}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it "
            f"as UTF-8, for example with `iconv -f latin1 -t utf-8`"
        ) from error
    try:
        if path.suffix == ".json":
            content = json.loads(text, object_pairs_hook=without_twins)
        elif path.suffix == ".toml":
            content = tomllib.loads(text)
        else:
            content = yaml.load(text, _Loader)
    except RecursionError as error:
        raise ConfigError(
            f"{path} is nested too deeply to be read; a config has sections, their keys, and few "
            f"maps in those"
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a {type(content).__name__}, but a config is a mapping of sections"
        )
    return content


def to_yaml(config: RunConfig) -> str:
    """Every key with its value, in the order of RunConfig; without the sections that do not exist
    with an algorithm that samples nothing."""
    without: set[str] = set(SAMPLING) if config.offline else set()
    settings = config.model_dump(mode="json", exclude=without)
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def _listed() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
