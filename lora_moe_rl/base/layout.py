"""Which tensors of the frozen base trainer and engine cut alike, so that one copy serves both.

    tensor              vLLM, a rank            Megatron, a rank          one copy serves both
    experts gate, up    w13 [E, 2I, H]          weight{e} [2I, H]         if both cut each expert
    experts down        w2 [E, H, I]            weight{e} [H, I]          into as many pieces
    q, k, v             rows q, then k, then v  rows of a query group     no: rows are permuted
                                                beside each other
    other linears       rows, or columns        the same                  no: vLLM's CPU build
                                                                          packs and drops them
    embedding, head,    rows                    the same                  not yet
    MLA's kv_b
    norms, routers      whole                   whole                     no: too small

A stack of experts is stored as [pieces, experts, rows, columns], so that each rank's part is one
piece of a range of experts, and a view: how many ranks share the experts out may differ between
the two. Of quantised experts it is the packed values, as the checkpoint has them; each side has
scales of its own. Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.config import RolloutConfig, TrainerConfig
from lora_moe_rl.rollout.facts import fused_parts

Relation = Literal["identical", "view", "permuted", "not shareable"]
SMALL = "norms and routers are too small to be worth it"
PACKED = "vLLM's CPU build packs linears for its own kernels and drops the rows"
LATER = "not done yet: each side has its own"
INT4_IN_WORD = 8  # values of INT4 in an int32


@dataclass(frozen=True)
class ExpertCut:
    """How one side cuts routed experts: `ranges` ranks share them out, and `pieces` ranks share
    each of them."""

    ranges: int
    pieces: int

    @classmethod
    def of_trainer(cls, trainer: TrainerConfig) -> ExpertCut:
        return cls(trainer.ep, trainer.etp)

    @classmethod
    def of_engine(cls, rollout: RolloutConfig) -> ExpertCut:
        return cls(rollout.tp, 1) if rollout.ep else cls(1, rollout.tp)


@dataclass(frozen=True)
class Stack:
    """Gate and up, or down, of all routed experts of a layer: `shape` is [pieces, experts, rows,
    columns] as it is stored."""

    name: str  # vLLM's
    megatron: str  # its module: expert e is `weight{e}` of it
    layer: int  # global
    modules: tuple[str, ...]  # ours, whose rows follow each other
    cut_rows: bool  # pieces are of the rows of each module, else of its columns
    shape: tuple[int, int, int, int]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Tensor:
    """What the rule says of one tensor, or of all of a kind. `reason`: '' where it is shared."""

    name: str  # vLLM's
    megatron: str
    relation: Relation
    elements: int  # of the whole model
    reason: str = ""


def stacks(shape: ModelShape, pieces: int, form: str | None = None) -> list[Stack]:
    """All stacks of routed experts, by layer, each expert in `pieces` pieces. `form`: int4 or fp8,
    of a quantised base."""
    hidden, width = shape.hidden_size, shape.dims["moe_intermediate"] // pieces
    in_word, suffix = (INT4_IN_WORD, "_packed") if form == "int4" else (1, "")
    gate_up = pieces, shape.num_experts, 2 * width, hidden // in_word
    down = pieces, shape.num_experts, hidden, width // in_word
    found = []
    for layer in shape.moe_layers:
        ours = f"model.layers.{layer}.{shape.family.moe_block}.experts.routed_experts"
        theirs = f"decoder.layers.{layer}.mlp.experts"
        names = f"{ours}.w13_weight{suffix}", f"{theirs}.linear_fc1"
        found.append(Stack(*names, layer, ("experts.gate", "experts.up"), True, gate_up))
        names = f"{ours}.w2_weight{suffix}", f"{theirs}.linear_fc2"
        found.append(Stack(*names, layer, ("experts.down",), False, down))
    return found


def rule(shape: ModelShape, trainer: TrainerConfig, rollout: RolloutConfig) -> list[Tensor]:
    """Every tensor of the base: routed experts one by one, then the rest by kind."""
    ours, theirs = ExpertCut.of_trainer(trainer), ExpertCut.of_engine(rollout)
    relation: Relation = "identical" if ours == theirs else "view"
    reason = _unlike(shape, ours, theirs)
    if reason:
        relation = "not shareable"
    experts = [
        Tensor(one.name, one.megatron, relation, one.elements, reason) for one in stacks(shape, 1)
    ]
    return [*experts, *_rest(shape)]


def _unlike(shape: ModelShape, trainer: ExpertCut, engine: ExpertCut) -> str:
    """Why two cuts of experts share nothing; '' when they do."""
    if trainer.pieces != engine.pieces:
        return (
            f"the engine cuts each expert into {engine.pieces} (rollout.tp without rollout.ep), "
            f"and the trainer into {trainer.pieces} (trainer.etp): set trainer.etp="
            f"{engine.pieces}, or rollout.ep=true and trainer.etp=1"
        )
    if shape.dims["moe_intermediate"] % engine.pieces:
        return (
            f"rollout.tp={engine.pieces} does not divide the {shape.dims['moe_intermediate']} "
            "columns of an expert, which vLLM pads"
        )
    return ""


def _rest(shape: ModelShape) -> Iterator[Tensor]:
    """What is private in any layout, one entry a kind of tensor."""
    elements: dict[str, int] = {}
    for layer in range(shape.num_layers):
        dims = shape.modules(layer)
        for path, modules in fused_parts(shape, layer).items():
            if dims[modules[0]][2] is None:
                kind = path.removeprefix(f"model.layers.{layer}.")
                elements[kind] = elements.get(kind, 0) + sum(
                    dims[module][0] * dims[module][1] for module in modules
                )
    for kind, count in elements.items():
        yield _linear(f"model.layers.*.{kind}.weight", kind.rpartition(".")[2], count)
    vocabulary = shape.vocab_size * shape.hidden_size
    for name, megatron in (
        ("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        ("lm_head.weight", "output_layer.weight"),
    ):
        yield Tensor(name, megatron, "identical", vocabulary, LATER)
    routers = len(shape.moe_layers) * shape.num_experts * shape.hidden_size
    norms = (2 * shape.num_layers + 1) * shape.hidden_size
    yield Tensor("norms and routers", "norms and routers", "identical", routers + norms, SMALL)


_MEGATRON = {
    "qkv_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "q_proj": "linear_q_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_b_proj": "linear_kv_up_proj",
    "fused_qkv_a_proj": "linear_q_down_proj, linear_kv_down_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "gate_up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}


def _linear(name: str, part: str, elements: int) -> Tensor:
    megatron = _MEGATRON[part]
    if part == "qkv_proj":
        reason = (
            "its rows are permuted: Megatron has q, k and v of a query group beside each other, "
            "vLLM all of q, then all of k, then all of v"
        )
        return Tensor(name, megatron, "permuted", elements, reason)
    relation: Relation = "view" if part == "fused_qkv_a_proj" else "identical"
    reason = LATER if part == "kv_b_proj" else PACKED  # which MLA keeps
    return Tensor(name, megatron, relation, elements, reason)
