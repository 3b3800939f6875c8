"""Bytes that travel: an adapter version into the engines, and router decisions out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.facts import Facts, Format
from lora_moe_rl.planner.formats import itemsize
from lora_moe_rl.planner.hardware import Efficiency, Gpu
from lora_moe_rl.planner.rollout import weight_bytes
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.rollout.facts import slot_rank

Way = Literal["per_expert", "shared_outer", "merged weights"]


@dataclass(frozen=True)
class Refit:
    """One refit of all engines. `sent`, `received`: most bytes of one trainer and one engine rank;
    `link`: most of one pair of them; `seconds`: of the busiest end over its own network link."""

    way: Way
    adapter: int
    sent: int
    received: int
    link: int
    transfers: int
    seconds: float


def refits(
    facts: Facts,
    specs: dict[Way, AdapterSpec],
    config: RunConfig,
    weights: Format,
    gpu: Gpu,
    efficiency: Efficiency,
) -> list[Refit]:
    """The refits of each expert layout, and of whole weights for comparison: every engine rank
    receives all it holds, and trainer ranks share the sending."""
    b, rollout = itemsize(weights), config.rollout
    speed = gpu.link * efficiency.links
    rows = []
    for way, spec in specs.items():
        layout = EngineLayout.of(rollout, slot_rank(spec), config.refit.mode == "merged")
        plan = make_plan(spec, config.trainer, layout, b)
        sent = rollout.engines * max(plan.sent_bytes().values())
        received = max(plan.received_bytes().values())
        seconds = max(sent, received) / speed
        link = max(plan.link_bytes.values())
        size = spec.num_parameters * b
        rows.append(Refit(way, size, sent, received, link, len(plan.transfers), seconds))
    received = weight_bytes(facts, rollout.tp, rollout.ep, weights, rollout.dp)
    everything = received * rollout.ranks * rollout.engines
    sent = everything // config.trainer.world_size
    link = sent // (rollout.ranks * rollout.engines)
    seconds = max(sent, received) / speed
    rows.append(Refit("merged weights", 0, sent, received, link, 0, seconds))
    return rows


@dataclass(frozen=True)
class Routes:
    """Router decisions: bytes a token packed at as many bits as an expert id needs, and as int16
    and int32 ids; of a step with samples of the given length."""

    token: int
    token_int16: int
    token_int32: int
    step: int


def routes(shape: ModelShape, tokens: int) -> Routes:
    """Bytes of routes as `kernels/route_codec` packs them (its package needs torch): the ids of all
    MoE layers, bit by bit, in whole bytes a token."""
    ids = len(shape.moe_layers) * shape.top_k
    bits = max(1, (shape.num_experts - 1).bit_length())
    token = -(-ids * bits // 8)
    return Routes(token, 2 * ids, 4 * ids, token * tokens)
