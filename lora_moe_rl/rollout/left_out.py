"""Mend for vLLM: the language model of a checkpoint that has other parts too.

vLLM's class of the language model by itself takes its weights from such a checkpoint too, and
fails at those that are no part of it, as a vision tower's. Here they are passed over before they
are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from vllm.model_executor.models.utils import AutoWeightsLoader

from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/rollout/left_out.py"

stock = AutoWeightsLoader.load_weights


def install(prefixes: tuple[str, ...]) -> None:
    """Of weights whose names begin with one of `prefixes`."""
    require_version("vllm", WHO)
    require_parameters(stock, ("self", "weights", "mapper"), WHO)

    def load_weights(self: AutoWeightsLoader, weights, *, mapper=None) -> set[str]:
        return stock(self, _kept(weights, prefixes), mapper=mapper)

    AutoWeightsLoader.load_weights = load_weights


def _kept(
    weights: Iterable[tuple[str, torch.Tensor]], prefixes: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, weight) for name, weight in weights if not name.startswith(prefixes))
