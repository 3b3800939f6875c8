"""A plan as one JSON object: every figure of the tables, in bytes, operations and seconds."""

from __future__ import annotations

from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from lora_moe_rl.planner.plan import RunPlan
from lora_moe_rl.planner.proposal import Proposal
from lora_moe_rl.rollout.facts import slot_rank


def as_json(plan: RunPlan, proposals: list[Proposal], whys: list[str]) -> dict[str, Any]:
    facts, assumed = plan.facts, plan.assumed
    mine, theirs, shared = plan.gpus
    return {
        "model": {
            "name": facts.name,
            "architecture": facts.shape.architecture,
            "source": facts.source,
            "parameters": plan.parameters,
            "published_parameters": facts.parameters,
        },
        "adapter": {
            "parameters": plan.spec.num_parameters,
            "tensors": plan.adapter_tensors,
            "slot_rank": slot_rank(plan.spec),
        },
        "assumed": asdict(assumed) | {"gpu": asdict(assumed.hardware.spec)},
        "gpus": {"trainer": mine, "engines": theirs, "shared": shared},
        "trainer": [
            {
                "name": c.name,
                "stages": c.stages,
                "ranks": c.ranks,
                "layers": len(c.layers),
                "base_parameters": c.base_parameters,
                "parameters_by_part": c.parts,
                "base_bytes": c.base_bytes,
                "adapter_parameters": c.adapter_parameters,
                "trained_parameters": c.trained_parameters,
                "memory": c.memory,
                "total": c.total,
                "host": c.host,
                "host_in_step": c.host_in_step,
            }
            for c in plan.classes
        ],
        "engine": plan.engine and asdict(plan.engine) | {"total": plan.engine.total},
        "refits": [asdict(refit) for refit in plan.refits],
        "routes": plan.routes and asdict(plan.routes),
        "flops": asdict(plan.flops) | {"adapter_share": plan.flops.adapter_share},
        "seconds": asdict(plan.seconds) | {"step": plan.seconds.step},
        "held": [asdict(part) for part in plan.held],
        "turns": [asdict(turn) | {"total": turn.total} for turn in plan.turns],
        "hosts": [asdict(node) | {"total": node.total, "name": node.name} for node in plan.hosts],
        "problems": plan.problems,
        "warnings": plan.warnings,
        "proposals": [
            {
                "settings": p.settings,
                "trainer_bytes": p.heaviest.total,
                "sequences": p.engine.sequences,
                "seconds": asdict(p.seconds) | {"step": p.seconds.step},
                "why": why,
            }
            for p, why in zip_longest(proposals, whys)
        ],
    }
