"""What of a run's settings is of no use to a service: its clients do the rest."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import value_of, value_text
from lora_moe_rl.config.section import is_set
from lora_moe_rl.errors import ConfigError

SECTIONS = ("algorithm", "schedule", "environment", "data", "reward", "eval", "checkpoint")
SECTIONS += ("faults", "tracker", "mismatch")
KEYS = {
    "model": ("chat_template", "chat_template_file"),
    "adapter": ("resize",),
    "trainer": (
        *("steps", "lr", "warmup_steps", "lr_schedule", "min_lr", "weight_decay", "adam_beta1"),
        *("adam_beta2", "adam_eps", "clip_grad", "share_prompts", "max_skipped_steps"),
        *("max_restarts", "max_copy_gib"),
    ),
    "rollout": ("max_response_tokens", "temperature"),
    "replay": ("missing", "compare_every"),
    "logging": ("run_dir", "samples_per_step", "tokens", "routes", "profile"),
}


KEY_STARTS = ("tml-", "eyJ")  # Tinker's SDK sends no others


def check_key(key: str | None) -> None:
    """Raises ConfigError for a key that no client would send."""
    if key is not None and not (key.startswith(KEY_STARTS) and key.isascii()):
        raise ConfigError(f"the key must begin with {KEY_STARTS[0]}: clients send no other")


def without_unused(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """What is left of a run's config, and the keys that it sets in vain."""
    unused = [*_unused(config)]
    given = config.model_dump(exclude_unset=True)
    for name in SECTIONS:
        given.pop(name, None)
    for name, keys in KEYS.items():
        section = given.get(name, {})
        for key in keys:
            section.pop(key, None)
    return RunConfig.model_validate(given), unused


def check_used(config: RunConfig) -> None:
    """Raises ConfigError for a key that is set in vain."""
    for key in _unused(config):
        raise ConfigError(
            f"{key}={value_text(value_of(config, key))} has no effect with a training service: its "
            "clients choose their data, losses, learning rates and samples; leave it out"
        )


def _unused(config: RunConfig) -> Iterator[str]:
    """The keys that are set."""
    for name in SECTIONS:
        section = value_of(config, name)
        yield from (f"{name}.{key}" for key in type(section).model_fields if is_set(section, key))
    for name, keys in KEYS.items():
        yield from (f"{name}.{key}" for key in keys if is_set(value_of(config, name), key))
