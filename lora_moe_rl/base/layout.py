"""Which tensors of the frozen base trainer and engine cut alike, so that one copy serves both.

    tensor              vLLM, a rank            Megatron, a rank          one copy serves both
    experts gate, up    w13 [E, 2I, H]          weight{e} [2I, H]         if both cut each expert
    experts down        w2 [E, H, I]            weight{e} [H, I]          into as many pieces
    linears, embedding,                                                   by `base/dense.py`
    head
    norms, routers      whole                   whole                     no: too small

A stack of experts is stored as [pieces, experts, rows, columns], so that each rank's part is one
piece of a range of experts, and a view: how many ranks share the experts out may differ between
the two. Of quantised experts it is the packed values, as the checkpoint has them, and
the scales of groups in the dtype of the engine; on GPUs both as vLLM lays out INT4 and MXFP4 for
its Marlin kernels, each piece of each expert apart (`kernels/dequant/formats.py`). On GPUs a
trainer rank has to find what it takes with the engine's rank on its own (`base/parts.py`). Pure:
no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.base.dense import EMBEDDING, HEAD, Dense, apart, dense, repeated
from lora_moe_rl.base.parts import missing_on_gpu
from lora_moe_rl.config import RolloutConfig, TrainerConfig

SMALL = "norms and routers are too small to be worth it"
QUANTISED = "the trainer keeps quantised linears packed, and vLLM's CPU build as numbers"
QUANTISED_ON_GPUS = "vLLM lays quantised linears out for its kernels"
# Of experts that are packed in groups of a row: values in an element, values that have one scale.
GROUPED = {"int4": (8, 32), "mxfp4": (2, 32)}
# As vLLM lays them out: what it calls the packed values of w13 and w2 then.
MARLIN = {"int4_marlin": "_packed", "mxfp4_marlin": ""}
# Its kernels take experts whose width, of a piece, and hidden size are multiples of these.
MARLIN_WIDTH, MARLIN_HIDDEN = 64, 128


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
    """Gate and up, or down, of all routed experts of a layer, or their scales: `shape` is [pieces,
    experts, rows, columns] as it is stored."""

    name: str  # vLLM's
    megatron: str  # its module: expert e is `weight{e}` of it; `.scales` behind it of scales
    layer: int  # global
    modules: tuple[str, ...]  # ours, whose rows follow each other
    cut_rows: bool  # pieces are of the rows of each module, else of its columns
    shape: tuple[int, int, int, int]
    scales: bool = False

    @property
    def kind(self) -> Literal["experts"]:
        return "experts"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Tensor:
    """What the rule says of one tensor, or of all of a kind. `reason`: '' where it is shared."""

    name: str  # vLLM's
    megatron: str
    elements: int  # of the whole model
    reason: str = ""


def stacks(shape: ModelShape, pieces: int, form: str | None = None) -> list[Stack]:
    """All stacks of routed experts, by layer, each expert in `pieces` pieces. `form`: as a
    quantised base is held. Scales of FP8 blocks, a four-thousandth, are not among them."""
    hidden, width = shape.hidden_size, shape.dims["moe_intermediate"] // pieces
    found = []
    for layer in shape.moe_layers:
        ours = f"model.layers.{layer}.{shape.family.moe_block}.experts.routed_experts"
        theirs = f"decoder.layers.{layer}.mlp.experts"
        for end, scales in _kinds(form):
            names = f"{ours}.w13_weight{end}", f"{theirs}.linear_fc1{'.scales' * scales}"
            size = pieces, shape.num_experts, *_stored(form, scales, 2 * width, hidden)
            modules = "experts.gate", "experts.up"
            found.append(Stack(*names, layer, modules, True, size, scales))
            names = f"{ours}.w2_weight{end}", f"{theirs}.linear_fc2{'.scales' * scales}"
            size = pieces, shape.num_experts, *_stored(form, scales, hidden, width)
            found.append(Stack(*names, layer, ("experts.down",), False, size, scales))
    return found


def _kinds(form: str | None) -> list[tuple[str, bool]]:
    """(what ends vLLM's name, whether it is scales) of each kind of stack."""
    if form in MARLIN:
        return [(MARLIN[form], False), ("_scale", True)]
    return [("_packed", False), ("_scale", True)] if form in GROUPED else [("", False)]


def _stored(form: str | None, scales: bool, out: int, in_features: int) -> tuple[int, int]:
    """Rows and columns of what is stored of a linear `[out, in]`, or of its scales."""
    if form in MARLIN:
        return (in_features // 32, out) if scales else (in_features // 16, 2 * out)
    in_element, group = GROUPED.get(str(form), (1, 1))
    return out, in_features // (group if scales else in_element)


def attention_apart(shape: ModelShape) -> str:
    """Why nothing of a model is shared, for its attention; '' where it is."""
    if shape.linear_layers:
        return f"a model with linear attention, as this {shape.architecture}, is not shared"
    if shape.family.attention == "fused_gqa":
        return f"a model with q, k and v in one linear, as this {shape.architecture}, is not shared"
    return ""


def rule(
    shape: ModelShape,
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    form: str | None = None,
    on_gpus: bool = False,
) -> list[Tensor]:
    """Every tensor of the base: routed experts one by one, then the rest by kind. `form`: of a
    quantised base; of linears outside routed experts FP8 alone is. `on_gpus`: whether each GPU
    holds what an engine's rank there has, for the trainer rank there, and not all for all."""
    ours, theirs = ExpertCut.of_trainer(trainer), ExpertCut.of_engine(rollout)
    reason = _unlike(shape, ours, theirs)
    if on_gpus and form in GROUPED:
        reason = reason or _not_for_marlin(shape, theirs)
    if on_gpus and not reason and shape.moe_layers:
        reason = _experts_missing(shape, trainer, rollout)
    experts = [Tensor(one.name, one.megatron, one.elements, reason) for one in stacks(shape, 1)]
    return [*experts, *_rest(shape, trainer, rollout, form, on_gpus)]


def _experts_missing(shape: ModelShape, trainer: TrainerConfig, rollout: RolloutConfig) -> str:
    """Why a GPU has not the same experts of both; '' where it has."""
    (first, *_) = stacks(shape, ExpertCut.of_engine(rollout).pieces)
    cut = rollout.tp, rollout.ep
    where = missing_on_gpu(first, shape.moe_layers, shape, trainer, *cut)
    return where and f"{where}: set trainer.ep={rollout.tp}, as rollout.tp with rollout.ep"


def _unlike(shape: ModelShape, trainer: ExpertCut, engine: ExpertCut) -> str:
    """Why two cuts of experts share nothing; '' when they do."""
    if shape.family.experts == "interleaved":
        return "the engine has the rows of gate and up in turn, and the trainer one after the other"
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


def _not_for_marlin(shape: ModelShape, engine: ExpertCut) -> str:
    """Why vLLM lays experts out as none that is held."""
    width = shape.dims["moe_intermediate"] // engine.pieces
    if width % MARLIN_WIDTH == 0 and shape.hidden_size % MARLIN_HIDDEN == 0:
        return ""
    return (
        f"vLLM's Marlin kernels take experts of a width of a multiple of {MARLIN_WIDTH}, to which "
        f"it pads others, and a hidden size of one of {MARLIN_HIDDEN}, and an engine's rank has "
        f"{width} and {shape.hidden_size}: use rollout.ep=true, which leaves experts whole, or a "
        "smaller rollout.tp"
    )


def _rest(
    shape: ModelShape,
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    form: str | None,
    on_gpus: bool,
) -> Iterator[Tensor]:
    """One entry a kind of tensor."""
    tp = rollout.tp
    kinds: dict[str, list[Dense]] = {}
    for one in dense(shape, 1):
        kinds.setdefault(kind(one), []).append(one)
    for name, (one, *others) in kinds.items():
        reason = repeated(shape, list(one.modules), tp) or apart(one, shape, trainer.tp, tp)
        if on_gpus and not reason:
            layers = _layers([one, *others], shape)
            reason = missing_on_gpu(one, layers, shape, trainer, tp, rollout.ep)
        if form == "fp8" and one.modules:
            reason = QUANTISED_ON_GPUS if on_gpus else QUANTISED
        each = one.elements if one.modules else shape.vocab_size * shape.hidden_size
        elements = each * (1 + len(others))
        yield Tensor(name, _MEGATRON[name.split(".")[-2]], elements, reason)
    routers = len(shape.moe_layers) * shape.num_experts * shape.hidden_size
    norms = (2 * shape.num_layers + 1) * shape.hidden_size
    yield Tensor("norms and routers", "norms and routers", routers + norms, SMALL)


def kind(one: Dense) -> str:
    """What the rule calls it, and all that are like it."""
    return one.name.replace(f"layers.{one.layer}.", "layers.*.")


def _layers(like: Iterable[Dense], shape: ModelShape) -> set[int]:
    """The layers with which tensors of one kind stand."""
    ends = {EMBEDDING: 0, HEAD: shape.num_layers - 1}
    return {ends.get(one.name, one.layer) for one in like}


_MEGATRON = {
    "embed_tokens": "embedding.word_embeddings",
    "lm_head": "output_layer",
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
