"""Linears, embedding and head: how the one copy of each is laid out, and which part is whose.

    tensor            vLLM, a rank              Megatron, a rank          held
    q, k and v        rows of q, k, then v      rows of a query group     vLLM's ranks, one after
                                                beside each other         the other
    gate and up       rows of gate, then up     the same                  the same
    q_b, kv_b, q      rows                      the same                  as in the checkpoint
    o, down           columns                   the same                  the same
    MLA's q_a, kv_a   whole, in one             whole, each by itself     the same
    embedding, head   rows, padded to 64s       padded to trainer.tp      padded to 64s

An engine's rank takes its rows or columns as they are. So does a trainer's; where they are in
another order than Megatron's, its linear puts what comes out into order. Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.sharding import Kind, dense_kind
from lora_moe_rl.rollout.facts import fused_parts

VOCABULARY = 64  # vLLM pads it to a multiple
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Dense:
    """A tensor `[rows, columns]` as it is stored. `modules`: ours, of a layer, whose rows follow
    each other on a rank of the engine; none of embedding and head."""

    name: str  # vLLM's
    layer: int  # global; -1 of embedding and head
    modules: tuple[str, ...]
    kind: Kind
    shape: tuple[int, int]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def fused_rows(self) -> bool:
        """Whether each rank of the engine has rows of several modules."""
        return self.kind == "column" and len(self.modules) > 1


def dense(shape: ModelShape, tp: int) -> Iterator[Dense]:
    """All that engines of `tp` ranks can hold as it is stored."""
    for layer in range(shape.num_layers):
        dims = shape.modules(layer)
        for path, modules in fused_parts(shape, layer).items():
            if dims[modules[0]][2] is None and not repeated(shape, modules, tp):
                rows = sum(dims[module][1] for module in modules)
                size = rows, dims[modules[0]][0]
                kind = dense_kind(modules[0])
                yield Dense(f"{path}.weight", layer, tuple(modules), kind, size)
    rows = math.ceil(shape.vocab_size / VOCABULARY) * VOCABULARY
    for name in (EMBEDDING, HEAD):
        yield Dense(name, -1, (), "column", (rows, shape.hidden_size))


def repeated(shape: ModelShape, modules: list[str], tp: int) -> str:
    """Why engine ranks have rows of a linear that others have too; '' when they have not."""
    if "k_proj" in modules and (heads := shape.dims["kv_heads"]) % tp:
        return f"rollout.tp={tp} gives several ranks the same of {heads} heads of k and v"
    return ""


def apart(one: Dense, shape: ModelShape, trainer_tp: int, tp: int) -> str:
    """Why a trainer rank cannot take its part of what engines of `tp` ranks hold; '' when it
    can."""
    if one.fused_rows and tp % trainer_tp:
        return (
            f"trainer.tp={trainer_tp} gives a rank rows that lie apart, as rollout.tp={tp} fuses "
            "them: set trainer.tp to a divisor of rollout.tp"
        )
    if not one.modules and math.ceil(shape.vocab_size / trainer_tp) * trainer_tp > one.shape[0]:
        return f"trainer.tp={trainer_tp} pads the vocabulary further than vLLM"
    return ""
