"""Prompts that a service proves its versions on: it has no data of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from lora_moe_rl.data.samples import Prompt

LENGTH = 12


class Probe:
    """Prompts of random tokens, the same for a seed: as much of `ports.Prompts` as the publisher
    asks."""

    def __init__(self, vocab_size: int, max_length: int, seed: int):
        self.vocab_size, self.seed = vocab_size, seed
        self.length = min(LENGTH, max_length // 2)

    def next(self, n: int) -> list[Prompt]:
        drawn = np.random.default_rng(self.seed).integers(0, self.vocab_size, (n, self.length))
        return [Prompt(row, "", ids) for row, ids in enumerate(drawn.tolist())]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
