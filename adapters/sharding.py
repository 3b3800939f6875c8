"""How adapter tensors are cut over trainer ranks, and whose gradients are summed: the one table.

Layers, checkpoints, refit and tests all read it. Pure: no torch.

    kind        modules                            A [r, in]              B [out, r]
    column      q k v, q_b, gate/up (dense,        whole on each tp rank  rows split over tp
                shared)
    row         o, down (dense, shared)            columns split over tp  whole on each tp rank
    replicated  q_a, kv_a (MLA's down projections) whole on each tp rank  whole on each tp rank
    experts     experts.gate/up/down               experts split over ep  experts split over ep

A whole tensor sees only this rank's tokens under sequence parallelism, so its gradient is summed
over the tensor-parallel group; a split one sees all tokens. Gradients of dense sites are summed
over data-parallel ranks, those of routed experts over the ranks that hold the same experts
(expert-data-parallel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["column", "row", "replicated", "experts"]


@dataclass(frozen=True)
class Rule:
    """`split`: the canonical dimension that is cut, or None for a tensor that is whole."""

    split: int | None
    sum_over_tp: bool


RULES: dict[Kind, dict[str, Rule]] = {
    "column": {"A": Rule(None, True), "B": Rule(0, False)},
    "row": {"A": Rule(1, False), "B": Rule(None, True)},
    "replicated": {"A": Rule(None, True), "B": Rule(None, True)},
    "experts": {"A": Rule(0, False), "B": Rule(0, False)},
}

_DENSE_KINDS: dict[str, Kind] = {
    "q_proj": "column",
    "k_proj": "column",
    "v_proj": "column",
    "q_b_proj": "column",
    "o_proj": "row",
    "q_a_proj": "replicated",
    "kv_a_proj": "replicated",
    "gate": "column",
    "up": "column",
    "down": "row",
}


def kind_of(module: str) -> Kind:
    """The kind of a canonical module name."""
    if module.startswith("experts."):
        return "experts"
    return _DENSE_KINDS[module.rpartition(".")[2]]


@dataclass(frozen=True)
class RankLayout:
    """Where one trainer rank stands: its place in, and the size of, each group it cuts tensors by.

    `dp_rank` and `expert_dp_rank` count the ranks that hold the same dense tensors and the same
    experts; of those, rank 0 exports.
    """

    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int
    dp_rank: int
    expert_dp_rank: int

    def place(self, kind: Kind) -> tuple[int, int]:
        """(rank, size) of the group that tensors of this kind are split over."""
        if kind == "experts":
            return self.ep_rank, self.ep_size
        return self.tp_rank, self.tp_size

    def local_range(
        self, kind: Kind, tensor: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(start, local shape) of this rank's part of a canonical tensor of the given shape."""
        split = RULES[kind][tensor].split
        start, local = [0] * len(shape), list(shape)
        if split is not None:
            rank, size = self.place(kind)
            if shape[split] % size:
                raise ValueError(f"{size} ranks do not divide dimension {split} of {shape}")
            local[split] = shape[split] // size
            start[split] = rank * local[split]
        return tuple(start), tuple(local)

    def exports(self, kind: Kind, tensor: str) -> bool:
        """True on exactly one of the ranks that hold equal copies."""
        if kind == "experts":
            return self.expert_dp_rank == 0
        whole = RULES[kind][tensor].split is None
        return self.dp_rank == 0 and (not whole or self.tp_rank == 0)
