"""What a rank of a vLLM engine holds: weights, adapter slots, and what is left for the KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RolloutConfig, RunConfig
from lora_moe_rl.planner import drafts
from lora_moe_rl.planner.base import BaseTensor, base_tensors, tensors_of_prediction
from lora_moe_rl.planner.facts import Facts, Format
from lora_moe_rl.planner.formats import itemsize, tensor_bytes
from lora_moe_rl.planner.hardware import GIB, Gpu
from lora_moe_rl.refit.plan import EngineLayout, held
from lora_moe_rl.rollout.facts import (
    STEP_TOKENS,
    Matrix,
    in_halves,
    served_slices,
    slot_rank,
    step_tokens,
)

# What vLLM's profiling run and CUDA graphs take, beside the logits of the sequences in flight.
PROFILE_BYTES = int(3 * GIB)
LOGIT_BYTES = 4 + 4 + 2  # float32 logits and logprobs, logits as they come


@dataclass(frozen=True)
class EngineRank:
    """Bytes of one rank of an engine. `kv_cache` is what vLLM's share of the GPU leaves, negative
    when there is too little; `sequences`: of `model.max_length` tokens that it holds."""

    weights: int
    slots: int
    working: int
    kv_cache: int
    kv_token: int
    sequences: int
    budget: int

    @property
    def memory(self) -> dict[str, int]:
        return {
            "weights": self.weights,
            "adapter slots": self.slots,
            "working": self.working,
            "KV cache": max(0, self.kv_cache),
        }

    @property
    def total(self) -> int:
        return sum(self.memory.values())


def engine_rank(
    facts: Facts, spec: AdapterSpec, config: RunConfig, weights: Format, gpu: Gpu
) -> EngineRank:
    """Ranks of an engine hold equally much, but for experts that do not divide: the first."""
    rollout, shape = config.rollout, facts.shape
    budget = int(rollout.gpu_memory_utilization * gpu.memory * GIB)
    tp, ep, dp = rollout.tp, rollout.ep, rollout.dp
    base = weight_bytes(facts, tp, ep, weights, dp)
    if layers := drafts.loaded_layers(facts, config):
        base += layers * _bytes(facts, tensors_of_prediction(facts), tp, ep, weights, dp)
    slots = 0 if config.refit.mode == "merged" else slot_bytes(spec, config, itemsize(weights))
    logits = LOGIT_BYTES * rollout.max_num_seqs * shape.vocab_size
    working = PROFILE_BYTES + logits + gathered_bytes(facts, rollout)
    working += rollout.max_num_seqs * state_bytes(facts, rollout.tp, itemsize(weights))
    token = kv_token_bytes(facts, rollout.tp, itemsize(weights), layers)
    made = EngineRank(base, slots, working, 0, token, 0, 0)
    return with_budget(made, budget, config.model.max_length)


def with_budget(engine: EngineRank, budget: int, max_length: int) -> EngineRank:
    """The same rank where vLLM may use so many bytes of the GPU."""
    kv_cache = budget - engine.weights - engine.slots - engine.working
    sequences = max(0, kv_cache) // (engine.kv_token * max_length)
    return replace(engine, kv_cache=kv_cache, sequences=sequences, budget=budget)


def weight_bytes(facts: Facts, tp: int, ep: bool, weights: Format, dp: int = 1) -> int:
    """Bytes of weights on the first of `tp * dp` ranks."""
    return _bytes(facts, base_tensors(facts), tp, ep, weights, dp)


def _bytes(
    facts: Facts, tensors: Iterable[BaseTensor], tp: int, ep: bool, weights: Format, dp: int
) -> int:
    return sum(
        tensor_bytes(tensor, engine_shape(facts, tensor, tp, ep, dp), weights) for tensor in tensors
    )


def gathered_bytes(facts: Facts, rollout: RolloutConfig) -> int:
    """What experts work on, beyond a step of one rank, where data-parallel ranks gather the tokens
    of all: of each token its rows at top_k experts, in bf16."""
    shape = facts.shape
    tokens = max(0, rollout.dp * step_tokens(rollout) - STEP_TOKENS)
    if not tokens or not shape.num_experts:
        return 0
    inner, hidden = shape.dims["moe_intermediate"], shape.hidden_size
    return 2 * tokens * (shape.top_k * (max(2 * inner, hidden) + inner) + 2 * hidden)


def engine_shape(
    facts: Facts, tensor: BaseTensor, tp: int, ep: bool, dp: int = 1
) -> tuple[int, ...]:
    """The shape of a rank's part as vLLM cuts it: key and value heads are repeated where there are
    fewer than ranks, experts are cut whole (ep, over tp * dp) or each along its width."""
    shape = list(tensor.shape)
    if tensor.part == "experts":
        dim, axis = tensor.split[-1]
        dim, ways = (0, tp * dp) if ep else (dim, tp if axis == "etp" else 1)
        shape[dim] = math.ceil(shape[dim] / ways)
        return tuple(shape)
    if not tensor.split:
        return tensor.shape
    d = facts.shape.dims
    if "linear_qkv" in tensor.name:
        kv_heads = max(d["kv_heads"], tp)
        shape[0] += 2 * (kv_heads - d["kv_heads"]) * d["head_dim"]
    dim = tensor.split[0][0]
    shape[dim] = math.ceil(shape[dim] / tp)
    return tuple(shape)


def slot_bytes(spec: AdapterSpec, config: RunConfig, b: int) -> int:
    """Bytes of all adapter slots on the first rank, with `b` bytes a value. A slot has room for the
    largest adapter rank at every site."""
    rank = slot_rank(spec)
    layout = EngineLayout.of(config.rollout, rank)
    kv_heads = spec.shape.dims.get("kv_heads", 0)
    total = 0
    for site in spec:
        matrices: tuple[Matrix, ...] = ("A", "B")
        for matrix in matrices:
            own = rank // 2 if matrix == "A" and in_halves(site, spec.shape) else rank
            boxes = held(replace(site, rank=own), matrix, layout, 0, kv_heads)
            copies = len(served_slices(spec.shape, site, matrix, boxes[0])[1])
            total += copies * sum(box.size for box in boxes)
    return total * b * config.refit.slots


def kv_token_bytes(facts: Facts, tp: int, b: int, further: int = 0) -> int:
    """Bytes that one token takes in the KV cache of one rank, with `b` bytes a value, and so many
    `further` layers. MLA's latent is the same on every rank; linear attention keeps none of
    tokens."""
    d = facts.shape.dims
    layers = facts.shape.num_layers - len(facts.shape.linear_layers) + further
    if facts.shape.family.attention == "mla":
        return layers * (d["kv_lora_rank"] + d["rope_dim"]) * b
    return layers * 2 * max(1, d["kv_heads"] // tp) * d["head_dim"] * b


def state_bytes(facts: Facts, tp: int, b: int) -> int:
    """Bytes that one sequence's states of linear attention take on one rank, however long it is:
    of each value head a matrix, and what the convolution looks back on."""
    d, layers = facts.shape.dims, len(facts.shape.linear_layers)
    if not layers:
        return 0
    keys = d["linear_key_heads"] * d["linear_key_dim"]
    values = d["linear_value_heads"] * d["linear_value_dim"]
    past = (2 * keys + values) * (d["linear_kernel"] - 1)
    return layers * (values * d["linear_key_dim"] + past) // tp * b
