"""The rewards of all data sets: which function scores a prompt follows from the set it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from lora_moe_rl.data.samples import Prompt, Sample
from lora_moe_rl.rewards.runner import RewardRunner


class RewardsBySet:
    """Runners, one for each function. Use it as a context manager, or call `close`.

    `functions`: by the name of the set ('': the only one), each after the key that names it. Raises
    ConfigError when one cannot be imported.
    """

    def __init__(self, functions: Mapping[str, tuple[str, str]], timeout_s: float):
        self._runners: dict[str, RewardRunner] = {}
        self._functions = {name: function for name, (_, function) in functions.items()}
        with ExitStack() as started:
            for key, function in functions.values():
                if function not in self._runners:
                    runner = started.enter_context(RewardRunner(function, timeout_s, key))
                    self._runners[function] = runner
            self._close = started.pop_all().close

    def of(self, name: str) -> RewardRunner:
        """The runner of a set."""
        return self._runners[self._functions[name]]

    async def score(
        self, prompt: Prompt, samples: Sequence[Sample]
    ) -> tuple[np.ndarray, list[str]]:
        """Rewards of a prompt's samples by the function of its set, as RewardRunner gives them."""
        return await self.of(prompt.data_set).score(prompt, samples)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> RewardsBySet:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
