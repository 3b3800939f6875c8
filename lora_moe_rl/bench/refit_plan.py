"""The plan of one refit of Kimi-K2, alone: 512 trainer ranks to an engine of 16."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.planner.facts import find
from lora_moe_rl.refit.plan import EngineLayout, lacking, make_plan, received

RANK, BF16 = 32, 2
TRAINER = TrainerConfig(world_size=512, tp=8, pp=8, ep=32)
ENGINE = EngineLayout(slot_rank=RANK, tp=16, ep=True)


def kimi_k2() -> dict[str, Any]:
    """Seconds and size of the plan. Raises BenchmarkError when something of it is missing."""
    spec = AdapterSpec.build(find("kimi-k2").shape, AdapterConfig(rank=RANK, alpha=RANK))
    started = time.perf_counter()
    plan = make_plan(spec, TRAINER, ENGINE, BF16)
    seconds = time.perf_counter() - started
    if faults := lacking(received(plan), spec, ENGINE):
        raise BenchmarkError(f"the plan of Kimi-K2 is not complete: {faults[0]}")
    links = Counter((t.source, t.target, t.site.layer) for t in plan.transfers)
    return {
        "rank": RANK,
        "trainer_ranks": TRAINER.world_size,
        "engine_ranks": ENGINE.tp,
        "seconds": seconds,
        "transfers": len(plan.transfers),
        "most_a_layer_and_link": max(links.values()),
        "most_bytes_received": max(plan.received_bytes().values()),
        "most_bytes_sent": max(plan.sent_bytes().values()),
        "bytes": sum(plan.link_bytes.values()),
    }
