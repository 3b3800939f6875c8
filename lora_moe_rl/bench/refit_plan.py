"""The plan of one refit of Kimi-K2, alone: 512 trainer ranks to an engine of 16."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.refit.plan import EngineLayout, Plan, held, make_plan

# As its published config.json says, as far as an adapter depends on it.
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": 61,
    "hidden_size": 7168, "vocab_size": 163840, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True,
    "rope_scaling": {
        "type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "beta_fast": 1,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
RANK, BF16 = 32, 2
TRAINER = TrainerConfig(world_size=512, tp=8, pp=8, ep=32)
ENGINE = EngineLayout(slot_rank=RANK, tp=16, ep=True)


def kimi_k2() -> dict[str, Any]:
    """Seconds and size of the plan. Raises BenchmarkError when something of it is missing."""
    spec = AdapterSpec.build(
        ModelShape.from_hf_config(KIMI_K2), AdapterConfig(rank=RANK, alpha=RANK)
    )
    started = time.perf_counter()
    plan = make_plan(spec, TRAINER, ENGINE, BF16)
    seconds = time.perf_counter() - started
    check_complete(plan, spec, ENGINE)
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


def check_complete(plan: Plan, spec: AdapterSpec, engine: EngineLayout) -> None:
    """Raises BenchmarkError unless every engine rank gets as many elements of every tensor as it
    holds, from boxes that do not repeat."""
    got: Counter[tuple[int, str, str]] = Counter()
    seen: set[tuple] = set()
    for t in plan.transfers:
        got[t.target, t.site.name, t.matrix] += t.box.size
        seen.add((t.target, t.site.name, t.matrix, t.box.start))
    if len(seen) != len(plan.transfers):
        raise BenchmarkError("the plan sends an element twice")
    kv_heads = spec.shape.dims.get("kv_heads", 0)
    for site in spec:
        for matrix in "AB":
            for rank in range(engine.tp):
                wanted = held(site, matrix, engine, rank, kv_heads).size
                if (found := got[rank, site.name, matrix]) != wanted:
                    raise BenchmarkError(
                        f"the plan sends {found} of {wanted} elements of {site.name}.{matrix} to "
                        f"engine rank {rank}"
                    )
