"""Which samples of a step are kept to be looked at."""

from __future__ import annotations

from lora_moe_rl.config import LoggingConfig


def spread(total: int, most: int) -> list[int]:
    """Up to `most` of `total` places, evenly: samples are of different prompts."""
    wanted = min(total, most)
    return [i * total // wanted for i in range(wanted)]


def with_tokens(settings: LoggingConfig, total: int) -> list[int]:
    """Which of a step's `total` samples have every token in tokens.jsonl."""
    return spread(total, settings.samples_per_step) if settings.tokens else []
