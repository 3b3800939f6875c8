"""What the rollout engine, vLLM, can serve, and under which names.

The one door through which config, adapters, refit and planner ask.

vLLM allocates adapter slots of a few ranks only; a smaller rank is served in the next larger slot,
padded with zeros. It fuses some linears: q, k and v are one module, gate and up another, all routed
experts of a layer a third. Each of its modules takes a fixed number of slices, each with an A and a
B of its own; those of routed experts come in the order gate, down, up.

Importing this file imports neither torch nor vLLM.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lora_moe_rl.adapters.families import ModelShape
    from lora_moe_rl.adapters.sharding import Box
    from lora_moe_rl.adapters.spec import AdapterSpec, Site
    from lora_moe_rl.config import RolloutConfig

Dtype = Literal["float32", "bfloat16"]
Matrix = Literal["A", "B"]

# Slot ranks that vLLM allocates (`vllm/config/lora.py`, MaxLoRARanks).
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# Largest of slots with adapters of routed experts, on GPUs, unless they are cut along the rank
# (`vllm/lora/ops/triton_ops/fused_moe_lora_op.py`, _run_fused_moe_lora_one_shot).
LARGEST_OF_EXPERTS = 128

# vLLM raises a temperature between 0 and this to this (`vllm/sampling_params.py`, _MAX_TEMP), and
# takes 0 for the likeliest token: no distribution, whose logprobs are all 0.
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0  # above it vLLM refuses a request

# Tokens of one step, of all data-parallel ranks of an engine together: each gathers them all at its
# experts. vLLM would take as many of every rank.
STEP_TOKENS = 8192

# Likeliest tokens at a place that vLLM tells without its max_logprobs.
MOST_LIKELIEST = 20

# Modules that vLLM cannot serve adapters on; no pattern of adapter.targets includes them, only
# their name.
NOT_SERVABLE = {
    "kv_b_proj": "vLLM absorbs it into MLA attention and would ignore the adapter; only a refit "
    "with merged weights (refit.mode=merged) serves it"
}


def most_likeliest(rollout: RolloutConfig) -> int | None:
    """How many of the likeliest tokens vLLM tells at a place; None for all."""
    most = rollout.engine_args.get("max_logprobs", MOST_LIKELIEST)
    return None if most == -1 else most


def step_tokens(rollout: RolloutConfig) -> int:
    """Most tokens of one step of a data-parallel rank, on GPUs."""
    return max(rollout.max_num_seqs, STEP_TOKENS // rollout.dp)


def slot_rank(spec: AdapterSpec) -> int:
    """The smallest slot rank that holds every site of an adapter."""
    largest = max(site.rank * (2 if in_halves(site, spec.shape) else 1) for site in spec.sites)
    return next(rank for rank in SLOT_RANKS if rank >= largest)


def in_halves(site: Site, shape: ModelShape) -> bool:
    """Whether a site has a half of its slot's rank: where experts have gate and up in turn, vLLM
    has both in one slot (`vllm/lora/layers/fused_moe.py`, FusedMoE3DWithLoRA)."""
    return shape.family.experts == "interleaved" and site.module in ("experts.gate", "experts.up")


def too_large_for_experts(spec: AdapterSpec, rollout: RolloutConfig) -> str:
    """Why vLLM's kernels on GPUs do not take slots of this rank, and the way out; '' when they do.
    A slot has one rank for all its modules."""
    rank = slot_rank(spec)
    experts = any(site.num_experts is not None for site in spec)
    if rank <= LARGEST_OF_EXPERTS or not experts or rollout.fully_sharded:
        return ""
    largest = max(spec, key=lambda site: site.rank)
    return (
        f"adapters of rank {largest.rank} ({largest.name}) have slots of rank {rank}, and vLLM's "
        f"kernels for adapters of routed experts take slots of up to {LARGEST_OF_EXPERTS}; lower "
        "adapter.rank, leave experts out of adapter.targets, or set rollout.fully_sharded=true "
        "(with rollout.tp above 1, and without rollout.ep)"
    )


# Our module name -> (vLLM's module below model.layers.N, part). The names of the blocks of
# experts are their family's.
_COMMON = {
    "o_proj": ("{attention}.{o_proj}", 0),
    "mlp.gate": ("mlp.gate_up_proj", 0),
    "mlp.up": ("mlp.gate_up_proj", 1),
    "mlp.down": ("mlp.down_proj", 0),
    "experts.gate": ("{moe_block}.experts", 0),
    "experts.down": ("{moe_block}.experts", 1),
    "experts.up": ("{moe_block}.experts", 2),
    "shared_expert.gate": ("{moe_block}.{shared_expert}.gate_up_proj", 0),
    "shared_expert.up": ("{moe_block}.{shared_expert}.gate_up_proj", 1),
    "shared_expert.down": ("{moe_block}.{shared_expert}.down_proj", 0),
}
_GQA = {
    "q_proj": ("{attention}.qkv_proj", 0),
    "k_proj": ("{attention}.qkv_proj", 1),
    "v_proj": ("{attention}.qkv_proj", 2),
    "query_key_value": ("{attention}.query_key_value", 0),
}
_GATED_DELTA = {
    "in_proj_qkvz": ("linear_attn.in_proj_qkvz", 0),
    "in_proj_ba": ("linear_attn.in_proj_ba", 0),
    "in_proj_qkv": ("linear_attn.in_proj_qkvz", 0),  # and 1, 2: `served_slices`
    "in_proj_z": ("linear_attn.in_proj_qkvz", 3),
    "in_proj_b": ("linear_attn.in_proj_ba", 0),
    "in_proj_a": ("linear_attn.in_proj_ba", 1),
    "out_proj": ("linear_attn.out_proj", 0),
}
_MLA = {
    "q_a_proj": ("self_attn.fused_qkv_a_proj", 0),
    "kv_a_proj": ("self_attn.fused_qkv_a_proj", 1),
    "q_b_proj": ("self_attn.q_b_proj", 0),
    "kv_b_proj": ("self_attn.kv_b_proj", 0),
}
_MLA_FULL_Q = {
    "q_proj": ("self_attn.q_proj", 0),
    "kv_a_proj": ("self_attn.kv_a_proj_with_mqa", 0),
    "kv_b_proj": ("self_attn.kv_b_proj", 0),
}


def served_module(shape: ModelShape, site: Site) -> tuple[str, int]:
    """(vLLM's module, part) of a site; of one that has several parts, the first of them."""
    return _module(shape, site.layer, site.module)


def served_slices(
    shape: ModelShape, site: Site, matrix: Matrix, box: Box
) -> tuple[str, tuple[int, ...]]:
    """(vLLM's module, the parts of it that hold a box of a site's A or B)."""
    module, parts = served_parts(shape, site)
    if matrix == "A" or len(parts) == 1:
        return module, parts
    ends = list(accumulate(site.blocks))
    return module, (parts[bisect_right(ends, box.start[0])],)


def served_parts(shape: ModelShape, site: Site) -> tuple[str, tuple[int, ...]]:
    """(vLLM's module, the parts of it that are a site's). Each block of a linear is a part, with an
    A of its own: all of them hold the site's. Those of query_key_value are one part."""
    module, part = served_module(shape, site)
    if site.module == "query_key_value":
        return module, (part,)
    return module, tuple(range(part, part + max(1, len(site.blocks))))


def fused_parts(shape: ModelShape, layer: int) -> dict[str, list[str]]:
    """`{vLLM's module: our modules that it fuses, in the order of its parts}` of a layer."""
    parts: dict[str, list[tuple[int, str]]] = {}
    for module in shape.modules(layer):
        path, part = _module(shape, layer, module)
        parts.setdefault(path, []).append((part, module))
    return {path: [module for _, module in sorted(found)] for path, found in parts.items()}


def _module(shape: ModelShape, layer: int, module: str) -> tuple[str, int]:
    family = shape.family
    if family.attention == "mla":
        attention = _MLA if shape.dims["q_lora_rank"] else _MLA_FULL_Q
    else:
        attention = _GQA | _GATED_DELTA
    suffix, part = (_COMMON | attention)[module]
    suffix = suffix.format(
        attention=family.served_attention,
        o_proj=family.names.get("o_proj", "o_proj"),
        moe_block=family.moe_block,
        shared_expert=family.shared_expert,
    )
    return f"model.layers.{layer}.{suffix}", part
