"""How adapter tensors are cut over trainer ranks, and whose gradients are summed: the one table.

Layers, gradient sums, checkpoints, refit and tests all read it. Pure: no torch.

    kind            modules                       A [r, in]                B [out, r]
    column          q k v (one by one or in one), whole                    rows over tp, those of
                    q_b, kv_b, in_proj_*, gate/up                          each block by itself
                    (dense, shared expert)
    row             o, out_proj, down (d., s. e.) columns over tp          whole
    replicated      q_a, kv_a (MLA down proj.)    whole                    whole
    experts_column  experts.gate/up               E over ep                E over ep, rows over etp
    experts_row     experts.down                  E over ep, cols over etp E over ep
    shared_column   experts.gate/up, one A        whole                    E over ep, rows over etp
    shared_row      experts.down, one B           E over ep, cols over etp whole

The ranks of a pipeline stage stand in two grids: (tp, dp) for dense tensors, dp counting
context-parallel ranks too, and (etp, ep, expert_dp) for those of routed experts. Each rank sees
some of the tokens, or some of the terms of the output, of a tensor that is not cut over an axis, so
that its gradient is summed over that axis. (Dense layers see tokens cut over tp: sequence
parallelism is always on. Expert-tensor-parallel ranks see the same tokens, each with a part of the
inner dimension of the experts.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lora_moe_rl.adapters.spec import Site

Axis = Literal["tp", "dp", "ep", "etp", "expert_dp"]
Kind = Literal[
    "column", "row", "replicated", "experts_column", "experts_row", "shared_column", "shared_row"
]

DENSE_GRID: tuple[Axis, ...] = ("tp", "dp")
EXPERT_GRID: tuple[Axis, ...] = ("etp", "ep", "expert_dp")


@dataclass(frozen=True)
class Rule:
    """`split`: (canonical dimension, axis it is cut over) pairs. `reduce`: the axes over which the
    gradient is summed."""

    split: tuple[tuple[int, Axis], ...]
    reduce: tuple[Axis, ...]


_WHOLE = Rule((), ("tp", "dp"))
_EXPERT = Rule(((0, "ep"),), ("etp", "expert_dp"))
_EXPERT_ROWS = Rule(((0, "ep"), (1, "etp")), ("expert_dp",))
_EXPERT_COLUMNS = Rule(((0, "ep"), (2, "etp")), ("expert_dp",))
_ALL_EXPERTS = Rule((), ("etp", "ep", "expert_dp"))

Table = Mapping[Kind, Mapping[str, Rule]]
RULES: Table = {
    "column": {"A": _WHOLE, "B": Rule(((0, "tp"),), ("dp",))},
    "row": {"A": Rule(((1, "tp"),), ("dp",)), "B": _WHOLE},
    "replicated": {"A": _WHOLE, "B": _WHOLE},
    "experts_column": {"A": _EXPERT, "B": _EXPERT_ROWS},
    "experts_row": {"A": _EXPERT_COLUMNS, "B": _EXPERT},
    "shared_column": {"A": _ALL_EXPERTS, "B": _EXPERT_ROWS},
    "shared_row": {"A": _EXPERT_COLUMNS, "B": _ALL_EXPERTS},
}

_DENSE_KINDS: dict[str, Kind] = {
    "q_proj": "column",
    "k_proj": "column",
    "v_proj": "column",
    "query_key_value": "column",
    "q_b_proj": "column",
    "kv_b_proj": "column",
    "in_proj_qkvz": "column",
    "in_proj_ba": "column",
    "in_proj_qkv": "column",
    "in_proj_z": "column",
    "in_proj_b": "column",
    "in_proj_a": "column",
    "o_proj": "row",
    "out_proj": "row",
    "q_a_proj": "replicated",
    "kv_a_proj": "replicated",
    "gate": "column",
    "up": "column",
    "down": "row",
}


# mcore linear, as a path below its layer -> the canonical modules fused in it, in output order. A
# layer has those of its kind.
_ATTENTION = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj", "query_key_value"),
    "self_attention.linear_q_proj": ("q_proj",),
    "self_attention.linear_q_down_proj": ("q_a_proj",),
    "self_attention.linear_q_up_proj": ("q_b_proj",),
    "self_attention.linear_kv_down_proj": ("kv_a_proj",),
    "self_attention.linear_kv_up_proj": ("kv_b_proj",),
    "self_attention.linear_proj": ("o_proj",),
    "self_attention.in_proj": (
        *("in_proj_qkvz", "in_proj_ba"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ),
    "self_attention.out_proj": ("out_proj",),
}
_MLPS = {"mlp": "mlp", "mlp.shared_experts": "shared_expert", "mlp.experts": "experts"}
FUSED = _ATTENTION | {
    f"{path}.{linear}": modules
    for path, name in _MLPS.items()
    for linear, modules in (
        ("linear_fc1", (f"{name}.gate", f"{name}.up")),
        ("linear_fc2", (f"{name}.down",)),
    )
}


def fused_with(module: str) -> tuple[str, ...]:
    """The modules whose A is trained as one tensor with this one's where a layer has them, itself
    among them."""
    return next(modules for modules in FUSED.values() if module in modules)


def dense_kind(module: str) -> Kind:
    """The kind of a module that is not of routed experts."""
    return _DENSE_KINDS[module.rpartition(".")[2]]


def kind_of(site: Site) -> Kind:
    if site.num_experts is None:
        return dense_kind(site.module)
    if site.module == "experts.down":
        return "shared_row" if site.shared == "B" else "experts_row"
    return "shared_column" if site.shared == "A" else "experts_column"


def grid_of(kind: Kind) -> tuple[Axis, ...]:
    """The axes that the ranks of a stage stand in, for tensors of this kind."""
    return DENSE_GRID if kind in ("column", "row", "replicated") else EXPERT_GRID


def reductions() -> list[tuple[Kind, str, Axis]]:
    """Every entry (kind, "A" or "B", axis) of the table."""
    return [
        (kind, tensor, axis)
        for kind, rules in RULES.items()
        for tensor, rule in rules.items()
        for axis in rule.reduce
    ]


def without(entries: Iterable[tuple[Kind, str, Axis]]) -> Table:
    """The table with entries (see `reductions`) left out: the fault that checks of layouts must
    catch. Raises ValueError for one that is not there."""
    table: dict[Kind, dict[str, Rule]] = {kind: dict(rules) for kind, rules in RULES.items()}
    for kind, tensor, axis in entries:
        rule = table[kind][tensor]
        if axis not in rule.reduce:
            raise ValueError(f"{kind}.{tensor} is not summed over {axis}")
        table[kind][tensor] = replace(rule, reduce=tuple(a for a in rule.reduce if a != axis))
    return table


@dataclass(frozen=True)
class Box:
    """`shape` elements at `start` of a canonical tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in the memory of `outer`."""
        return tuple(
            slice(a - o, a - o + n)
            for a, o, n in zip(self.start, outer.start, self.shape, strict=True)
        )

    def common(self, other: Box) -> Box | None:
        """The elements that both have, if any."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            start.append(low)
            shape.append(high - low)
        return Box(tuple(start), tuple(shape))


@dataclass(frozen=True)
class RankLayout:
    """Where one trainer rank stands: (rank, size) on each axis. `table`: how tensors are cut and
    summed; another than `RULES` is a fault, to see that it is noticed."""

    tp: tuple[int, int] = (0, 1)
    dp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)
    expert_dp: tuple[int, int] = (0, 1)
    table: Table = field(default_factory=lambda: RULES, compare=False, repr=False)

    def place(self, axis: Axis) -> tuple[int, int]:
        return getattr(self, axis)

    def local_range(
        self, kind: Kind, tensor: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(start, local shape) of this rank's part of a canonical tensor of the given shape."""
        start, local = [0] * len(shape), list(shape)
        for dim, axis in self.table[kind][tensor].split:
            rank, size = self.place(axis)
            if shape[dim] % size:
                raise ValueError(f"{axis}={size} does not divide dimension {dim} of {shape}")
            local[dim] = shape[dim] // size
            start[dim] = rank * local[dim]
        return tuple(start), tuple(local)

    def boxes(self, site: Site, tensor: str, rank: int | None = None) -> list[Box]:
        """This rank's parts of a canonical tensor of a site, in the order in which it holds them:
        one, or of B one of each block. `rank`: of the tensor, where that is not the site's."""
        kind, rank = kind_of(site), site.rank if rank is None else rank
        if tensor == "A":
            shape = (*site.shape_A[:-2], rank, site.in_features)
            return [Box(*self.local_range(kind, tensor, shape))]
        shape, found, first = (*site.shape_B[:-1], rank), [], 0
        for rows in site.blocks or (site.out_features,):
            start, local = self.local_range(kind, tensor, (*shape[:-2], rows, rank))
            found.append(Box((*start[:-2], first + start[-2], start[-1]), local))
            first += rows
        return found

    def exports(self, kind: Kind, tensor: str) -> bool:
        """True on exactly one of the ranks that hold equal copies."""
        return all(
            self.place(axis)[0] == 0
            for axis in grid_of(kind)
            if self.copied_over(kind, tensor, axis)
        )

    def copied_over(self, kind: Kind, tensor: str, axis: Axis) -> bool:
        """Whether the ranks along an axis hold equal copies of a tensor."""
        split = {a for _, a in self.table[kind][tensor].split}
        return axis in grid_of(kind) and axis not in split


def window(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices that cut `shape` elements at `start` out of a whole tensor."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def pipeline_chunks(num_layers: int, chunks: int) -> list[int]:
    """Layers of each pipeline chunk in the order of the model. What does not divide goes to the
    chunks after the first, which holds the embedding too."""
    even, extra = divmod(num_layers, chunks)
    return [even + (1 <= i <= extra) for i in range(chunks)]
