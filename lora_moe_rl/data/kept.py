"""Which samples of a step are kept to be looked at."""

from __future__ import annotations

from lora_moe_rl.config import LoggingConfig


def spread(total: int, most: int) -> list[int]:
    """Up to `most` of `total` places, evenly: samples are of different prompts."""
    wanted = min(total, most)
    return [i * total // wanted for i in range(wanted)]


def with_tokens(settings: LoggingConfig, total: int) -> list[int]:
    """Of a step's `total` samples those of which tokens.jsonl has every token."""
    return spread(total, settings.samples_per_step) if settings.tokens else []
