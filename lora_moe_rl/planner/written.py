"""A planned run as a recipe: a Python file that one reads, changes and runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pydantic import BaseModel

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.config.plugins import KINDS
from lora_moe_rl.config.recipes import load_config, resolve
from lora_moe_rl.errors import ConfigError, LoraMoeRlError
from lora_moe_rl.planner.hardware import GIB, Hardware
from lora_moe_rl.planner.plan import RunPlan, make
from lora_moe_rl.planner.request import read

WIDTH = 100
# Where a plan has no data and no reward of its own.
ROWS, REWARD = "prompts.jsonl", "lora_moe_rl.rewards:math_verify"
NAME = r"[A-Za-z0-9._-]+"


def write(plan: RunPlan, path: Path, argv: Sequence[str]) -> None:
    """Writes the recipe and loads it, as a run would: what it says is what was planned. Raises
    ConfigError for a plan that does not fit, and for a file that is there or cannot be named so."""
    if plan.problems:
        raise ConfigError(f"the run does not fit, so --write {path} writes nothing")
    check_path(path, "--write")
    config = _whole(plan.config, path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(plan, config, path.name, argv), encoding="utf-8")
    try:
        _check(path, config)
    except LoraMoeRlError:
        path.unlink()
        raise


def check_path(path: Path, word: str) -> None:
    """Raises ConfigError for a file that is there, or that cannot be a recipe. `word`: after which
    the path was given."""
    if path.exists():
        raise ConfigError(f"{word} {path}: there is such a file; name another, or remove it")
    if path.suffix != ".py" or not re.fullmatch(NAME, path.stem):
        raise ConfigError(f"{word} {path} is not the name of a recipe, as my_run.py")


def _check(path: Path, config: RunConfig) -> None:
    """Loads and plans the recipe as anyone would. Raises ConfigError where it does not fit: what a
    plan assumes beside its config, as --served, a recipe does not hold."""
    if resolve(load_config(str(path))) != resolve(config):
        raise AssertionError(f"{path} is not the run that was planned; please report it")
    request = read([str(path)])
    problems = make(request.facts, request.config, request.assumed).problems
    if problems:
        raise ConfigError(
            f"--write {path} writes nothing: a recipe holds no --base, --served or lengths, and "
            f"without them the run does not fit: {'; '.join(problems)}"
        )


def _whole(config: RunConfig, name: str) -> RunConfig:
    """The config with what a run needs beside what a plan does."""
    settings: dict[str, object] = {"name": name}
    if config.data.path is None and config.data.generator is None:
        settings["data"] = {"path": ROWS, "chat_template": True}
    if config.reward.function is None and not config.reward.functions:
        settings["reward"] = {"function": REWARD}
    return with_settings(config, settings)


def text(plan: RunPlan, config: RunConfig, file: str, argv: Sequence[str]) -> str:
    sections = {key: _section(config, key) for key in RunConfig.model_fields if key != "name"}
    given = {key: value for key, value in sections.items() if value is not None}
    classes = sorted(
        {"RunConfig", *re.findall(r"\b[A-Z]\w+Config(?=\()", " ".join(given.values()))}
    )
    body = "".join(f"    {key}={value},\n" for key, value in given.items())
    return (
        f'"""{_about(plan, config, file, argv)}"""\n\n'
        "import lora_moe_rl.recipe\n"
        f"{_import(classes)}"
        "from lora_moe_rl.planner.hardware import Hardware\n\n"
        f"hardware = {_hardware(plan.assumed.hardware)}\n\n"
        f'config = RunConfig(\n    name="{config.name}",\n{body})\n\n'
        'if __name__ == "__main__":\n    lora_moe_rl.recipe.main(config, __file__)\n'
    )


def _about(plan: RunPlan, config: RunConfig, file: str, argv: Sequence[str]) -> str:
    hardware, engine = plan.assumed.hardware, plan.engine
    assert engine is not None, "plan --write is refused for a run without engines"
    words = shlex.join(argv).replace("\\", "\\\\").replace('"', '\\"')
    lines = [
        f"{plan.facts.name} on {hardware.gpus} GPUs of {hardware.spec.memory:g} GiB, written by",
        "",
        f"    lora-moe-rl plan {words}",
        "",
        f"By the plan a trainer rank holds up to {plan.heaviest.total / GIB:.0f} GiB, an engine "
        f"rank {engine.total / GIB:.0f},",
        f"with room for {engine.sequences} sequences of {config.model.max_length:,} tokens. Not "
        "run yet.",
        "",
    ]
    if config.data.path == ROWS:
        lines += [f'{ROWS} is to hold your rows: {{"prompt": ..., "answer": ...}}, one a line.']
    return "\n".join([*lines, f"`lora-moe-rl check {file}` says what a run lacks.", ""])


def _import(classes: list[str]) -> str:
    line = f"from lora_moe_rl.config import {', '.join(classes)}\n"
    if len(line) <= WIDTH:
        return line
    names = "".join(f"    {name},\n" for name in classes)
    return f"from lora_moe_rl.config import (\n{names})\n"


def _hardware(hardware: Hardware) -> str:
    values = {f.name: getattr(hardware, f.name) for f in fields(hardware)}
    defaults = {f.name: f.default for f in fields(hardware)}
    given = {key: value for key, value in values.items() if value != defaults[key]}
    return f"Hardware({', '.join(f'{key}={value!r}' for key, value in given.items())})".replace(
        "'", '"'
    )


def _section(config: RunConfig, key: str) -> str | None:
    """A section as Python, with the keys that are not their defaults; None when all are. Those that
    a plug-in has are a dict, whose class depends on its name."""
    value = getattr(config, key)
    if not isinstance(value, BaseModel):
        return None if value == RunConfig.model_fields[key].default else _python(value)
    given = {
        name: getattr(value, name)
        for name, field in type(value).model_fields.items()
        if getattr(value, name) != field.get_default(call_default_factory=True)
    }
    if not given:
        return None
    common = type(RunConfig.model_fields[key].default)
    if key in KINDS and not given.keys() <= common.model_fields.keys():
        pairs, ends = [f"{_python(k)}: {_python(v)}" for k, v in given.items()], "{}"
    else:
        pairs, ends = [f"{k}={_python(v)}" for k, v in given.items()], "()"
    opened = (common.__name__ if ends == "()" else "") + ends[0]
    line = f"{opened}{', '.join(pairs)}{ends[1]}"
    if len(f"    {key}={line},") <= WIDTH:
        return line
    return opened + "\n" + "".join(f"        {pair},\n" for pair in pairs) + "    " + ends[1]


def _python(value: object) -> str:
    """A value as Python writes it, with the quotes that a formatter puts."""
    if isinstance(value, str) and "'" not in value and '"' not in value and "\\" not in value:
        return f'"{value}"'
    return repr(value)
