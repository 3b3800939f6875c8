"""From a recipe or a config file to a resolved RunConfig, for `lora-moe-rl train` and `plan`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lora_moe_rl.config import RunConfig, SetConfig, SourceConfig
from lora_moe_rl.config.files import SUFFIXES, read_config_file
from lora_moe_rl.config.overrides import readable, with_settings
from lora_moe_rl.config.plugins import KINDS
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import absolute_spec, load_file


def load_config(target: str | None) -> RunConfig:
    """The config of a recipe (.py) or of a file (.yaml, .json, .toml); all defaults without one."""
    if target is None:
        return RunConfig()
    path = Path(target)
    if path.suffix in SUFFIXES:
        return with_settings(RunConfig(), read_config_file(path))
    if path.suffix != ".py":
        raise ConfigError(
            f"{target!r} is neither a recipe (.py) nor a config file ({', '.join(SUFFIXES)}); "
            f"settings are written key=value or --key value"
        )
    try:
        module = load_file(path)
    except ConfigError as error:
        # A recipe whose own RunConfig(...) is wrong: say what is wrong, not how it was found.
        if isinstance(error.__cause__, ValidationError):
            raise ConfigError(f"{target}: {readable(error.__cause__)}") from error
        raise
    config = vars(module).get("config")
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"the recipe {target} defines no `config`: it needs `config = RunConfig(...)`"
        )
    return config


def resolve(config: RunConfig) -> RunConfig:
    """`config` with what depends on the current directory made absolute, and the file of a system
    prompt read: it is saved so, and any process can use it. Raises ConfigError for a file of a
    function or of a system prompt that is not there."""
    settings: dict[str, dict[str, Any]] = {
        "logging": {"run_dir": os.path.abspath(config.run_dir)},
        "model": {},
        "data": _resolved(config.data),
        "reward": {},
    }
    for section in KINDS:
        name = getattr(config, section).name
        if ":" in name:
            settings[section] = {"name": absolute_spec(name)}
    if config.reward.function is not None:
        settings["reward"]["function"] = absolute_spec(config.reward.function)
    if config.reward.functions:
        settings["reward"]["functions"] = {
            name: {"function": absolute_spec(one.function)}
            for name, one in config.reward.functions.items()
            if one.function is not None
        }
    if config.data.sets:
        sources = config.data.sources().items()
        settings["data"]["sets"] = {name: _resolved(source) for name, source in sources}
    if _is_directory(config.model.path):
        settings["model"]["path"] = os.path.abspath(Path(config.model.path).expanduser())
    return with_settings(config, settings)


def _resolved(source: SourceConfig) -> dict[str, Any]:
    """What of a data set depends on the current directory."""
    found: dict[str, Any] = {}
    if source.system_prompt_file is not None:
        found = {"system_prompt": _system_prompt(source), "system_prompt_file": None}
    if source.generator is not None:
        found["generator"] = absolute_spec(source.generator)
    if source.path is not None and Path(source.path).expanduser().exists():
        found["path"] = os.path.abspath(Path(source.path).expanduser())
    if isinstance(source, SetConfig) and source.reward is not None and ":" in source.reward:
        found["reward"] = absolute_spec(source.reward)
    return found


def _system_prompt(source: SourceConfig) -> str:
    """What stands in system_prompt_file, without line breaks at its end."""
    path = Path(str(source.system_prompt_file)).expanduser()
    named = f"{source.key('system_prompt_file')}={source.system_prompt_file}"
    try:
        text = path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise ConfigError(
            f"{named} cannot be read ({path.absolute()}): {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8: byte {error.start} is {error.reason}") from error
    if not text.strip():
        raise ConfigError(f"{named} is empty; leave it out to have no system prompt")
    return text


def _is_directory(model: str) -> bool:
    """True when `model` is a directory: one that is there comes before any name, as `resolve_model`
    has it."""
    return model.startswith(("/", "./", "../", "~")) or Path(model).is_dir()
