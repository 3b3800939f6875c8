"""Every tensor of the frozen base as Megatron-core holds it, and each rank's part of it.

Names are mcore's, with the global number of the layer and the experts of a layer stacked in one
tensor: `decoder.layers.7.mlp.experts.linear_fc1.weight` of shape `[E, 2 I, H]` is weight0..E-1 of
layer 7. Transformer Engine keeps some norms inside the linear behind them, under another name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.sharding import Axis, Box, RankLayout
from lora_moe_rl.planner.facts import Facts
from lora_moe_rl.refit.plan import TrainerRank

Split = tuple[tuple[int, Axis], ...]
ROWS: Split = ((0, "tp"),)
COLUMNS: Split = ((1, "tp"),)
WHOLE: Split = ()
EXPERT_ROWS: Split = ((0, "ep"), (1, "etp"))
EXPERT_COLUMNS: Split = ((0, "ep"), (2, "etp"))
PARTS = ("embeddings", "attention", "router", "experts", "shared experts", "dense MLPs", "norms")


@dataclass(frozen=True)
class BaseTensor:
    """`split`: (dimension, axis) pairs it is cut over. `layer` -1: before the first layer, and
    `num_layers`: behind the last. `buffer`: float32 whatever the base's dtype, and no parameter.
    `linear`: a matrix that FP8 checkpoints hold in FP8; `part`: one of PARTS."""

    name: str
    shape: tuple[int, ...]
    split: Split
    layer: int
    part: str
    linear: bool = False
    buffer: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def local(self, layout: RankLayout) -> Box:
        """A rank's part. Sizes divide: `check_layout` has seen to it, and the vocabulary is padded
        to a multiple of tp."""
        start, shape = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.split:
            rank, ways = layout.place(axis)
            size = -(-shape[dim] // ways)
            if self.part != "embeddings" and shape[dim] % ways:
                raise ValueError(f"{axis}={ways} does not divide dimension {dim} of {self.name}")
            start[dim], shape[dim] = rank * size, size
        return Box(tuple(start), tuple(shape))


def base_tensors(facts: Facts) -> Iterator[BaseTensor]:
    """All of them, in the order of the model."""
    yield from tensors_before(facts)
    for layer in range(facts.shape.num_layers):
        yield from tensors_of_layer(facts, layer)
    yield from tensors_behind(facts)


def tensors_before(facts: Facts) -> Iterator[BaseTensor]:
    """The tensors of the first stage, before its layers."""
    vocabulary = (facts.shape.vocab_size, facts.shape.hidden_size)
    yield BaseTensor("embedding.word_embeddings.weight", vocabulary, ROWS, -1, "embeddings")


def tensors_of_layer(facts: Facts, layer: int) -> Iterator[BaseTensor]:
    for tensor in (*_attention(facts, layer), *_mlp(facts, layer)):
        yield replace(tensor, name=f"decoder.layers.{layer}.{tensor.name}")


def tensors_behind(facts: Facts) -> Iterator[BaseTensor]:
    """The tensors of the last stage, behind its layers."""
    hidden, last = facts.shape.hidden_size, facts.shape.num_layers
    vocabulary = (facts.shape.vocab_size, hidden)
    yield BaseTensor("decoder.final_layernorm.weight", (hidden,), WHOLE, last, "norms")
    yield BaseTensor("output_layer.weight", vocabulary, ROWS, last, "embeddings")


def num_parameters(facts: Facts) -> int:
    """Parameters of the model as published, with router corrections, without prediction layers."""
    return sum(tensor.size for tensor in base_tensors(facts))


def prediction_parameters(facts: Facts) -> int:
    """Parameters of the layers that predict further tokens, each with embeddings and a head."""
    vocabulary = 2 * facts.shape.vocab_size * facts.shape.hidden_size
    layer = sum(tensor.size for tensor in tensors_of_prediction(facts))
    return facts.prediction_layers * (layer + vocabulary)


def tensors_of_prediction(facts: Facts) -> Iterator[BaseTensor]:
    """Those of a layer that predicts a further token, without embeddings and head: a last layer's,
    with a projection of two states to one and three norms."""
    hidden, last = facts.shape.hidden_size, facts.shape.num_layers
    yield from tensors_of_layer(facts, last - 1)
    yield BaseTensor("eh_proj.weight", (hidden, 2 * hidden), WHOLE, last, "attention")
    for name in ("enorm", "hnorm", "norm"):
        yield BaseTensor(f"{name}.weight", (hidden,), WHOLE, last, "norms")


def held_by(facts: Facts, rank: TrainerRank) -> dict[BaseTensor, Box]:
    """What one trainer rank holds: its layers, the embedding with the first of them, the final norm
    and the head with the last."""
    tensors = [t for layer in sorted(rank.layers) for t in tensors_of_layer(facts, layer)]
    if 0 in rank.layers:
        tensors = [*tensors_before(facts), *tensors]
    if facts.shape.num_layers - 1 in rank.layers:
        tensors += tensors_behind(facts)
    return {tensor: tensor.local(rank.layout) for tensor in tensors}


def _attention(facts: Facts, layer: int) -> Iterator[BaseTensor]:
    shape, c = facts.shape, facts.config
    d, hidden = shape.dims, shape.hidden_size

    def norm(name: str, width: int) -> BaseTensor:
        return BaseTensor(name, (width,), WHOLE, layer, "norms")

    def linear(name: str, rows: int, columns: int, split: Split) -> BaseTensor:
        name = f"self_attention.{name}.weight"
        return BaseTensor(name, (rows, columns), split, layer, "attention", linear=True)

    yield norm("input_layernorm.weight", hidden)
    if shape.family.attention == "mla":
        query = d["heads"] * (d["nope_dim"] + d["rope_dim"])
        if d["q_lora_rank"]:
            yield linear("linear_q_down_proj", d["q_lora_rank"], hidden, WHOLE)
            yield norm("self_attention.q_layernorm.weight", d["q_lora_rank"])
            yield linear("linear_q_up_proj", query, d["q_lora_rank"], ROWS)
        else:
            yield linear("linear_q_proj", query, hidden, ROWS)
        yield linear("linear_kv_down_proj", d["kv_lora_rank"] + d["rope_dim"], hidden, WHOLE)
        yield norm("self_attention.kv_layernorm.weight", d["kv_lora_rank"])
        keys = d["heads"] * (d["nope_dim"] + d["v_dim"])
        yield linear("linear_kv_up_proj", keys, d["kv_lora_rank"], ROWS)
        yield linear("linear_proj", hidden, d["heads"] * d["v_dim"], COLUMNS)
        return
    if layer in shape.linear_layers:
        yield from _delta(shape, layer)
        return
    queries = d["heads"] * (2 if shape.family.attention == "gated_gqa" else 1)
    rows = (queries + 2 * d["kv_heads"]) * d["head_dim"]
    yield linear("linear_qkv", rows, hidden, ROWS)
    if shape.family.qkv_bias(c):
        yield BaseTensor("self_attention.linear_qkv.bias", (rows,), ROWS, layer, "attention")
    if shape.family.qk_norm(c):
        for name, heads in (("q_layernorm", d["heads"]), ("k_layernorm", d["kv_heads"])):
            one = norm(f"self_attention.{name}.weight", d["head_dim"])
            if shape.family.norm_over_heads:
                one = replace(one, shape=(heads * d["head_dim"],), split=ROWS)
            yield one
    yield linear("linear_proj", hidden, d["heads"] * d["head_dim"], COLUMNS)
    if shape.family.experts == "interleaved":  # and with them biases of all linears, and sinks
        name = "self_attention.linear_proj.bias"
        yield BaseTensor(name, (hidden,), WHOLE, layer, "attention")
        name = "self_attention.core_attention.softmax_offset"
        yield BaseTensor(name, (d["heads"],), ROWS, layer, "attention")


def _delta(shape: ModelShape, layer: int) -> Iterator[BaseTensor]:
    """The part of gated DeltaNet behind its norm."""
    d, part = shape.dims, "attention"
    keys, heads = d["linear_key_heads"] * d["linear_key_dim"], d["linear_value_heads"]
    values = heads * d["linear_value_dim"]

    def named(name: str, sizes: tuple[int, ...], split: Split, linear: bool = False) -> BaseTensor:
        return BaseTensor(f"self_attention.{name}", sizes, split, layer, part, linear=linear)

    fused = 2 * keys + 2 * values + 2 * heads
    yield named("in_proj.weight", (fused, shape.hidden_size), ROWS, linear=True)
    yield named("conv1d.weight", (2 * keys + values, 1, d["linear_kernel"]), ROWS)
    yield named("A_log", (heads,), ROWS)
    yield named("dt_bias", (heads,), ROWS)
    yield BaseTensor(
        "self_attention.out_norm.weight", (d["linear_value_dim"],), WHOLE, layer, "norms"
    )
    yield named("out_proj.weight", (shape.hidden_size, values), COLUMNS, linear=True)


def _mlp(facts: Facts, layer: int) -> Iterator[BaseTensor]:
    shape = facts.shape
    d, hidden = shape.dims, shape.hidden_size
    yield BaseTensor("pre_mlp_layernorm.weight", (hidden,), WHOLE, layer, "norms")
    if layer not in shape.moe_layers:
        yield from _pair("mlp", d["intermediate"], hidden, layer, "dense MLPs")
        return
    experts = shape.num_experts
    yield BaseTensor("mlp.router.weight", (experts, hidden), WHOLE, layer, "router")
    if shape.family.router != "softmax":
        name = "mlp.router.expert_bias"
        yield BaseTensor(name, (experts,), WHOLE, layer, "router", buffer=True)
    width = d["moe_intermediate"]
    for name, sizes, split in (
        ("linear_fc1", (experts, 2 * width, hidden), EXPERT_ROWS),
        ("linear_fc2", (experts, hidden, width), EXPERT_COLUMNS),
    ):
        yield BaseTensor(f"mlp.experts.{name}.weight", sizes, split, layer, "experts", linear=True)
        if shape.family.experts == "interleaved":
            cut = split if split is EXPERT_ROWS else split[:1]
            yield BaseTensor(f"mlp.experts.{name}.bias", sizes[:2], cut, layer, "experts")
    if shape.family.experts == "interleaved":
        yield BaseTensor("mlp.router.bias", (experts,), WHOLE, layer, "router")
    if d["shared_intermediate"]:
        width = d["shared_intermediate"]
        yield from _pair("mlp.shared_experts", width, hidden, layer, "shared experts")
        if shape.family.shared_gate:
            name = "mlp.shared_experts.gate_weight"
            yield BaseTensor(name, (1, hidden), WHOLE, layer, "shared experts")


def _pair(prefix: str, width: int, hidden: int, layer: int, part: str) -> Iterator[BaseTensor]:
    up, down = (2 * width, hidden), (hidden, width)
    yield BaseTensor(f"{prefix}.linear_fc1.weight", up, ROWS, layer, part, linear=True)
    yield BaseTensor(f"{prefix}.linear_fc2.weight", down, COLUMNS, layer, part, linear=True)
