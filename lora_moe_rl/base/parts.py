"""Which part of a tensor that is held is whose: of each rank of an engine, of each of the trainer.

    tensor                    a rank of the engine            a rank of the trainer
    experts, stacked          its experts, or its piece       its experts of its piece
    linears                   its rows or columns, or all     the same
    embedding, head           its rows of the padded          its rows of its own padding

On GPUs each holds what the engine's rank there has, and the trainer rank there takes its part out
of that. Rank r of the trainer stands beside rank r % tp of engine r // tp
(`cluster/placement.py`). Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.sharding import Box, Kind, RankLayout
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.refit.plan import trainer_ranks

Shape = tuple[int, ...]
DIMENSIONS = {4: ("pieces", "experts", "rows", "columns"), 2: ("rows", "columns")}


class Stored(Protocol):
    """A `Stack` or a `Dense`, as it is stored."""

    @property
    def layer(self) -> int: ...
    @property
    def modules(self) -> tuple[str, ...]: ...
    @property
    def kind(self) -> Kind | Literal["experts"]: ...
    @property
    def shape(self) -> Shape: ...


def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def engine_part(one: Stored, tp: int, ep: bool, rank: int) -> Box:
    """What rank `rank` of an engine has. Experts that do not divide go to the first ranks."""
    if one.kind == "experts":
        return _cut(whole(one.shape), 1 if ep else 0, rank, tp)
    if one.kind == "replicated":
        return whole(one.shape)
    return _cut(whole(one.shape), 0 if one.kind == "column" else 1, rank, tp)


def trainer_part(
    one: Stored, shape: ModelShape, at: RankLayout, modules: Sequence[str] = ()
) -> Box:
    """What the trainer rank `at` its place takes; of a linear that is fused in the engine alone,
    the rows of `modules`."""
    if one.kind == "experts":
        return _cut(_cut(whole(one.shape), 0, *at.etp), 1, *at.ep)
    if one.kind == "replicated":
        rows = [shape.modules(one.layer)[module][1] for module in one.modules]
        place = one.modules.index(modules[0]) if modules else 0
        size = rows[place] if modules else one.shape[0]
        return Box((sum(rows[:place]), 0), (size, one.shape[1]))
    rank, ways = at.tp
    if not one.modules:
        rows = math.ceil(shape.vocab_size / ways)  # Megatron pads to a multiple of tp
        return Box((rank * rows, 0), (rows, one.shape[1]))
    return _cut(whole(one.shape), 0 if one.kind == "column" else 1, rank, ways)


def missing_on_gpu(
    one: Stored,
    layers: Iterable[int],
    shape: ModelShape,
    trainer: TrainerConfig,
    tp: int,
    ep: bool,
) -> str:
    """Where a trainer rank finds less than it takes on its GPU, of tensors that are cut like `one`
    and stand in `layers`; '' where each finds all. Engines have `tp` ranks, `ep` or not."""
    found = frozenset(layers)
    for rank in trainer_ranks(trainer, shape.num_layers):
        beside = rank.rank % tp
        takes, held = trainer_part(one, shape, rank.layout), engine_part(one, tp, ep, beside)
        if rank.layers & found and takes.common(held) != takes:
            return (
                f"trainer rank {rank.rank} takes {told(takes, one.shape)}, and rank {beside} of "
                f"the engine on its GPU has {told(held, one.shape)}"
            )
    return ""


def told(box: Box, shape: Shape) -> str:
    """A part of a tensor of `shape`, in words."""
    cuts = [
        f"{name} {start}:{start + size} of {of}"
        for name, start, size, of in zip(
            DIMENSIONS[len(shape)], box.start, box.shape, shape, strict=True
        )
        if size != of
    ]
    return ", ".join(cuts) or "all"


def _cut(box: Box, dim: int, rank: int, ways: int) -> Box:
    """The part of a box that one rank has, of `ways` ranks that share it out."""
    even, extra = divmod(box.shape[dim], ways)
    start, shape = [*box.start], [*box.shape]
    start[dim] += rank * even + min(rank, extra)
    shape[dim] = even + (rank < extra)
    return Box(tuple(start), tuple(shape))
