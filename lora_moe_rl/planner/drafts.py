"""What an engine holds beside the model for tokens that are guessed (speculative decoding)."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.config import RunConfig
from lora_moe_rl.models.directory import prediction_layers
from lora_moe_rl.planner.facts import Facts
from lora_moe_rl.rollout import speculation


def loaded_layers(facts: Facts, config: RunConfig) -> int:
    """The layers that predict further tokens, where these guess; embeddings and head are the
    model's own. Of a published model it may not be said how many there are: one."""
    if speculation.guesser(config) != "layers":
        return 0
    return max(1, facts.prediction_layers, prediction_layers(facts.config))


def not_counted(config: RunConfig) -> Iterator[str]:
    """A sentence about a model of its own that guesses, of which nothing is known here."""
    if speculation.guesser(config) == "model":
        yield (
            f"{speculation.SETTING} has engines load a model that guesses "
            f"({speculation.method(config)}): its weights and KV cache are not counted"
        )
