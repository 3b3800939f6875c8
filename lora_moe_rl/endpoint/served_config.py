"""With what an adapter or a model is served: what its run had, and what the command line sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_moe_rl.config import RunConfig, TrainerConfig, overrides
from lora_moe_rl.config.overrides import override, parse_arguments
from lora_moe_rl.config.recipes import resolve
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.export import chat_template
from lora_moe_rl.export.run_settings import run_of, settings_at
from lora_moe_rl.files.adapter_source import Source
from lora_moe_rl.files.unchanged import flat

# What a setting may set: SOURCE and options say all else.
READ = ("rollout.", "model.max_length", "model.chat_template", "model.revision",
        "model.trust_remote_code", "trainer.dtype", "trainer.fp8_forward")  # fmt: skip
# Of rollout.*, what is a run's: how it samples, and what it does about its engines.
OF_RUNS = ("engines", "least_engines", "gpus_per_engine", "max_response_tokens", "temperature",
           "start_timeout_s", "max_restarts", "silent_s", "max_silences")  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What is known of how an adapter was trained. `origin`: where its template comes from."""

    config: RunConfig
    origin: str


def trained_with(source: Path, found: Source) -> Trained:
    """What the source was trained with: of a run or a checkpoint in one, the settings of the
    checkpoint's step; of a PEFT directory the template beside it. Raises ConfigError for a
    config.yaml that cannot be read."""
    run = run_of(source, found.path)
    if run is None:
        template = chat_template.of_adapter(None, found.path)
        model = found.config.model.model_copy(update={"chat_template": template})
        config = found.config.model_copy(update={"model": model})
        return Trained(config, str(found.path / chat_template.FILE))
    config = overrides.with_settings(RunConfig(), settings_at(run, found.path))
    config = config.model_copy(update={"adapter": found.config.adapter})
    return Trained(config, f"that of {run} at {found.path.name}")


def with_settings(config: RunConfig, settings: list[str], slots: int) -> RunConfig:
    """The config of one engine with so many slots, and of the one rank that fills them. Raises
    ConfigError for an adapter that no engine serves beside its base."""
    keys = [key for layer in parse_arguments(settings) for key in flat(layer)]
    for key in keys:
        if not key.startswith(READ) or key.removeprefix("rollout.") in OF_RUNS:
            read = ", ".join(f"{one}*" if one.endswith(".") else one for one in READ)
            raise ConfigError(
                f"serve does not read {key}; it reads {read} but for {', '.join(OF_RUNS)}: how a "
                "client samples stands in its requests, and there is one engine"
            )
    config = _with_template(config, settings, keys)
    if config.refit.mode == "merged":
        raise ConfigError(
            "refit.mode=merged: this adapter is served merged into its base alone; write that with "
            "`lora-moe-rl export --to merged`, and serve it as a model"
        )
    one_rank = TrainerConfig(dtype=config.trainer.dtype)
    refit = config.refit.model_copy(update={"slots": slots})
    rollout = config.rollout.model_copy(update={"engines": 1})
    return config.model_copy(update={"trainer": one_rank, "refit": refit, "rollout": rollout})


def _with_template(config: RunConfig, settings: list[str], keys: Sequence[str]) -> RunConfig:
    """`settings` over `config`, whose own template a file of them takes the place of."""
    if "model.chat_template_file" in keys:
        config = overrides.with_settings(config, {"model": {"chat_template": None}})
    config = override(config, settings)
    return resolve(config) if config.model.chat_template_file is not None else config


def template_in_words(config: RunConfig, trained: Trained | None) -> str:
    """Where the template that is served with comes from."""
    if config.model.chat_template is None:
        return "the tokenizer's own"
    if trained and config.model.chat_template == trained.config.model.chat_template:
        return trained.origin
    return "that of the command line"
