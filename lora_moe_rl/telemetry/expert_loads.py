"""What a step's counts of chosen experts become in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.telemetry import names


def metrics(layers: Sequence[int], loads: np.ndarray) -> dict[str, float]:
    """loads: int64 [layers, experts], how often each expert was chosen. Empty when none was."""
    totals = loads.sum(axis=1)
    if not totals.size or not totals.all():
        return {}
    shares = loads / totals[:, None]
    num_experts = loads.shape[1]
    busiest = shares.max(axis=1) * num_experts
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    entropy = -(shares * logs).sum(axis=1) / np.log(num_experts) if num_experts > 1 else 1.0
    by_layer = {
        names.of_busiest(layer): float(most) for layer, most in zip(layers, busiest, strict=True)
    }
    return {
        names.BUSIEST: float(busiest.max()),
        names.LOAD_ENTROPY: float(np.mean(entropy)),
        names.IDLE_EXPERTS: float((loads == 0).mean()),
    } | by_layer
