"""From a recipe or a config file to a resolved RunConfig, for `lora-moe-rl train` and `plan`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any

from pydantic import ValidationError

from lora_moe_rl.config import EvalSetConfig, RunConfig, SetConfig, SourceConfig
from lora_moe_rl.config.files import SUFFIXES, read_config_file
from lora_moe_rl.config.overrides import override, readable, with_settings
from lora_moe_rl.config.plugins import KINDS, PARTS, Kind
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import absolute_spec, load_file

CONFIG = "config.yaml"  # of a run directory


def load_config(target: str | None) -> RunConfig:
    """The config of a recipe (.py) or of a file (.yaml, .json, .toml); all defaults without one."""
    if target is None:
        return RunConfig()
    path = Path(target)
    if path.suffix in SUFFIXES:
        return with_settings(RunConfig(), read_config_file(path))
    if path.suffix != ".py":
        if (path / CONFIG).is_file():
            raise ConfigError(f"{target!r} is a run directory; its config is {path / CONFIG}")
        raise ConfigError(
            f"{target!r} is neither a recipe (.py) nor a config file ({', '.join(SUFFIXES)}); "
            f"settings are written key=value or --key value"
        )
    try:
        module = load_file(path)
    except ConfigError as error:
        # A recipe whose own RunConfig(...) is wrong: say what is wrong, not how it was found.
        if isinstance(error.__cause__, ValidationError):
            raise wrong_in(target, error.__cause__) from error
        raise
    config = vars(module).get("config")
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"the recipe {target} defines no `config`: it needs `config = RunConfig(...)`"
        )
    return config


def where_it_lies(config: RunConfig, target: str | None) -> RunConfig:
    """`config`, read from the config.yaml `target` of a run directory, with that directory as its
    own: it may have been moved since, or be a copy of one that is still there."""
    path = Path(target or "").absolute()
    its = config.logging.run_dir
    if path.name != CONFIG or its is None or not Path(its).is_absolute():
        return config
    here = path.parent
    if not any((here / "checkpoints").glob("step-*")) or here.resolve() == Path(its).resolve():
        return config
    return with_settings(config, {"logging": {"run_dir": str(here)}})


def wrong_in(recipe: str, error: ValidationError) -> ConfigError:
    """What is wrong with a config that the file `recipe` makes, and in which of its lines."""
    return ConfigError(f"{recipe}{_line_in(Path(recipe), error)}: {readable(error)}")


def _line_in(path: Path, error: BaseException) -> str:
    """The line of a file at which an error was raised, or came through."""
    file = str(path.expanduser().absolute())
    lines = [one.lineno for one in extract_tb(error.__traceback__) if one.filename == file]
    return f", line {lines[-1]}" if lines else ""


def resolved(target: str | None, arguments: Sequence[str]) -> RunConfig:
    """The resolved config of a recipe or file, with `arguments` laid over it: of a command that
    takes `RECIPE key=value ...`. Raises ConfigError."""
    return resolve(override(load_config(target), arguments))


def resolve(config: RunConfig) -> RunConfig:
    """`config` with what depends on the current directory made absolute, and the files of system
    prompts and of a chat template read: it is saved so, and any process can use it. Raises
    ConfigError for a file that is not there."""
    settings: dict[str, dict[str, Any]] = {
        "logging": {"run_dir": os.path.abspath(config.run_dir)},
        "model": {},
        "data": _resolved(config.data),
        "reward": {},
    }
    for section in KINDS:
        name = getattr(config, section).name
        if ":" in name:
            settings[section] = {"name": _specs(KINDS[section], name)}
    for part, kind in PARTS.items():
        if isinstance(name := getattr(config.algorithm, part, None), str) and ":" in name:
            settings.setdefault("algorithm", {})[part] = _specs(kind, name)
    settings["environment"] = settings.get("environment", {}) | config.environment.absolute()
    settings["checkpoint"] = config.checkpoint.absolute()
    settings["adapter"] = config.adapter.absolute()
    if config.reward.function is not None:
        settings["reward"]["function"] = _spec("reward.function", config.reward.function)
    if config.reward.functions:
        settings["reward"]["functions"] = {
            name: {"function": _spec(f"reward.functions.{name}.function", one.function)}
            for name, one in config.reward.functions.items()
            if one.function is not None
        }
    if config.data.sets:
        sources = config.data.sources().items()
        settings["data"]["sets"] = {name: _resolved(source) for name, source in sources}
    if config.eval.sets:
        held_out = {n: _resolved(one) for n, one in config.eval.sets.items()}
        settings["eval"] = {"sets": held_out}
    if config.model.chat_template_file is not None:
        text = _text_of("model.chat_template_file", config.model.chat_template_file)
        settings["model"] = {"chat_template": text, "chat_template_file": None}
    if _is_directory(config.model.path):
        settings["model"]["path"] = os.path.abspath(Path(config.model.path).expanduser())
    return with_settings(config, settings)


def _resolved(source: SourceConfig) -> dict[str, Any]:
    """What of a data set depends on the current directory."""
    found: dict[str, Any] = {}
    if source.system_prompt_file is not None:
        text = _text_of(source.key("system_prompt_file"), source.system_prompt_file)
        found = {"system_prompt": text, "system_prompt_file": None}
    if source.generator is not None:
        found["generator"] = _spec(source.key("generator"), source.generator)
    if source.path is not None and Path(source.path).expanduser().exists():
        found["path"] = os.path.abspath(Path(source.path).expanduser())
    own = isinstance(source, SetConfig | EvalSetConfig)
    if own and source.reward is not None and ":" in source.reward:
        found["reward"] = _spec(source.key("reward"), source.reward)
    return found


def _specs(kind: Kind, names: str) -> str:
    """Names of plug-ins, of which those of one's own are good in any directory."""
    return ",".join(_spec(kind.key, one) if ":" in one else one for one in kind.ones(names))


def _spec(key: str, spec: str) -> str:
    """A function or class by its name, good in any directory. Raises ConfigError that names the
    key."""
    try:
        return absolute_spec(spec.strip())
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _text_of(key: str, file: str) -> str:
    """What stands in a file that a config key names, without line breaks at its end."""
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise ConfigError(
            f"{key}={file} cannot be read ({path.absolute()}): {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{key}={file} is not UTF-8: byte {error.start} is {error.reason}"
        ) from error
    if not text.strip():
        raise ConfigError(f"{key}={file} is empty; leave it out to have none")
    return text


def _is_directory(model: str) -> bool:
    """True when `model` is a directory: one that is there comes before any name, as `resolve_model`
    has it."""
    return model.startswith(("/", "./", "../", "~")) or Path(model).is_dir()
