"""The layouts that a search tries: how GPUs are cut between trainer and engines, and trainers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.models.fit import can_share

MAX_PP = 32
TPS = (1, 2, 4, 8)
EVERY_SPLIT = 64  # GPUs of which every split between trainer and engines is tried

# What is given of a layout, and every layout that is tried has: `{"trainer": {"tp": 2}}`.
Kept = Mapping[str, Mapping[str, Any]]


def totals(gpus: int, node: int) -> list[int]:
    """Numbers of GPUs that layouts are tried on, all first: fewer where some stay idle, as a whole
    node's layouts are faster than those of nodes and a GPU."""
    sizes = [1]
    while 2 * sizes[-1] <= node:
        sizes.append(2 * sizes[-1])
    return sorted({gpus // size * size for size in (*sizes, node)} - {0}, reverse=True)


def splits(gpus: int, node: int) -> range:
    """Numbers of GPUs for engines alone that are tried: of many GPUs whole nodes, or
    eighths of larger ones."""
    step = 1
    if gpus > EVERY_SPLIT:
        step = math.gcd(node, 8)  # a node of 72 GPUs is cut as nodes of 8 are
        while gpus // step > EVERY_SPLIT:
            step *= 2
    return range(step, gpus, step)


def trainer_layouts(
    shape: ModelShape, trainer: TrainerConfig, world: int, kept: Mapping[str, Any]
) -> Iterator[TrainerConfig]:
    """All that divide the model and are as `kept` says, with and without recomputation; etp and
    vpp stay 1, and cp what it is."""
    recomputes = ("none",) if trainer.offloads_activations else ("none", "full")
    for tp in _of(kept, "tp", TPS):
        if world % tp or not divides(shape, tp, trainer.cp):
            continue
        for pp in _of(kept, "pp", range(1, min(MAX_PP, shape.num_layers) + 1)):
            if world % (tp * trainer.cp * pp):
                continue
            ranks = world // pp
            for ep in _of(kept, "ep", range(1, min(ranks, shape.num_experts or 1) + 1)):
                if ranks % ep or shape.num_experts % ep:
                    continue
                for recompute in _of(kept, "recompute", recomputes):
                    layout = {"world_size": world, "tp": tp, "pp": pp, "ep": ep, "etp": 1}
                    layout |= {"vpp": 1, "recompute": recompute, "gpus_per_rank": 1.0}
                    yield trainer.model_copy(update=layout)


def _of(kept: Mapping[str, Any], key: str, tried: Any) -> Any:
    return (kept[key],) if key in kept else tried


def divides(shape: ModelShape, tp: int, cp: int) -> bool:
    """Whether tp divides the heads, and the key/value heads where they are cut; and cp ranks can
    share those that are left."""
    heads, kv_heads = shape.dims["heads"], shape.dims.get("kv_heads", tp)
    linear = shape.dims.get("linear_key_heads", heads)
    if heads % tp or kv_heads % tp or linear % tp:
        return False
    shared = all(can_share(number // tp, cp, False) for number in (heads, linear))
    return shared and can_share(kv_heads // tp, cp, True)


def divides_engine(shape: ModelShape, tp: int) -> bool:
    """Whether tp divides the heads. vLLM repeats key/value heads where ranks are more, of most
    families."""
    kv_heads = shape.dims.get("kv_heads", tp)
    if shape.dims.get("linear_key_heads", tp) % tp:
        return False
    repeated = shape.family.repeats_keys and tp % kv_heads == 0
    return shape.dims["heads"] % tp == 0 and (kv_heads % tp == 0 or repeated)
