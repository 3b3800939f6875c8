"""Which slice of which canonical tensor goes from which trainer rank to which engine rank.

Pure, and computed once a run: from the trainer's layout, the engine's layout and the adapter's
sites to a list of transfers, one for each tensor of a site and pair of ranks that have something of
it in common. Both ends find the place in their own memory by taking their own start off the
transfer's.

    tensor of                     what an engine rank holds of it
    column (q k v, gate/up, ...)  A whole; B rows over tp (k and v: over the key/value heads)
    row (o, down)                 A columns over tp; B whole
    replicated (q_a, kv_a)        whole
    experts, with ep              the rank's experts, whole: over tp * dp
    experts, without              all experts: B rows of gate/up and A columns of down over tp

With `fully_sharded` (vLLM's fully_sharded_loras) the A of a column and of experts' gate/up is cut
along the slot's rank, the B of a row and of experts' down along its rows.

Ranks are numbered with tp fastest, then dp. Of all but the experts data-parallel ranks hold the
same.

With `merged` an engine rank merges whole weights, and takes of every tensor the whole; with ep, of
the experts' its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from lora_moe_rl.adapters.sharding import (
    Box,
    RankLayout,
    kind_of,
    pipeline_chunks,
)
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.config import RolloutConfig, TrainerConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.rollout.facts import NOT_SERVABLE, Matrix

# Each of their blocks is cut as a linear of its own.
CUT_AS = {"query_key_value": ("q_proj", "k_proj", "v_proj")}


@dataclass(frozen=True)
class EngineLayout:
    """One vLLM engine. `slot_rank` is its max_lora_rank; `merged`: it has no slots."""

    slot_rank: int
    tp: int = 1
    ep: bool = False
    fully_sharded: bool = False
    merged: bool = False
    dp: int = 1

    def __post_init__(self):
        if self.ep and self.fully_sharded:
            raise RefitError(
                "vLLM cuts adapters over the same ranks by experts (ep) or by rank "
                "(fully_sharded), not by both; choose one"
            )
        if self.fully_sharded and self.slot_rank % self.tp:
            raise RefitError(
                f"{self.tp} engine ranks do not divide an adapter slot of rank {self.slot_rank}, "
                "which fully_sharded cuts over them"
            )

    @classmethod
    def of(cls, rollout: RolloutConfig, slot_rank: int, merged: bool = False) -> EngineLayout:
        cut = rollout.tp, rollout.ep, rollout.fully_sharded
        return cls(slot_rank, *cut, merged, rollout.dp)

    @property
    def ranks(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True)
class TrainerRank:
    """One trainer rank: its place in its stage, and the global layers it holds."""

    rank: int
    layout: RankLayout
    layers: frozenset[int]


@dataclass(frozen=True)
class Transfer:
    """`box` of the canonical tensor `site.matrix`, from trainer rank `source` to engine rank
    `target`."""

    source: int
    target: int
    site: Site
    matrix: Matrix
    box: Box


@dataclass(frozen=True)
class Plan:
    """All transfers of one refit, in the order of the sites."""

    transfers: tuple[Transfer, ...]
    itemsize: int

    @cached_property
    def link_bytes(self) -> Counter[tuple[int, int]]:
        """Bytes of each (trainer rank, engine rank)."""
        counts: Counter[tuple[int, int]] = Counter()
        for t in self.transfers:
            counts[t.source, t.target] += t.box.size * self.itemsize
        return counts

    def sent_bytes(self) -> Counter[int]:
        """Bytes that each trainer rank sends."""
        return _sum(self.link_bytes, 0)

    def received_bytes(self) -> Counter[int]:
        """Bytes that each engine rank receives."""
        return _sum(self.link_bytes, 1)


def _sum(links: Counter[tuple[int, int]], end: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for link, nbytes in links.items():
        counts[link[end]] += nbytes
    return counts


def trainer_ranks(config: TrainerConfig, num_layers: int) -> list[TrainerRank]:
    """Every rank in Megatron's order: tp fastest, then cp, dp, pp slowest; of the experts' grid etp
    fastest, then ep, then expert_dp."""
    stage_size = config.world_size // config.pp
    chunks = pipeline_chunks(num_layers, config.pp * config.vpp)
    first = [sum(chunks[:i]) for i in range(len(chunks))]
    ranks = []
    for rank in range(config.world_size):
        stage, n = divmod(rank, stage_size)
        mine = range(stage, len(chunks), config.pp)
        layers = frozenset(
            layer for chunk in mine for layer in range(first[chunk], first[chunk] + chunks[chunk])
        )
        ranks.append(TrainerRank(rank, _place(config, n), layers))
    return ranks


def _place(config: TrainerConfig, n: int) -> RankLayout:
    experts = config.etp * config.ep
    return RankLayout(
        tp=(n % config.tp, config.tp),
        dp=(n // config.tp, config.dense_dp),
        etp=(n % config.etp, config.etp),
        ep=(n // config.etp % config.ep, config.ep),
        expert_dp=(n // experts, config.stage_ranks // experts),
    )


def make_plan(
    spec: AdapterSpec, trainer: TrainerConfig, engine: EngineLayout, itemsize: int
) -> Plan:
    """The transfers of one refit to one engine. `itemsize`: bytes an element in flight.

    Raises RefitError for a site that vLLM serves no adapter of, unless `engine` merges.
    """
    ranks = trainer_ranks(trainer, spec.shape.num_layers)
    stages = {layer: [r for r in ranks if layer in r.layers] for layer in range(max_layer(spec))}
    kv_heads = spec.shape.dims.get("kv_heads", 0)
    known: dict[tuple, list[tuple[list[int], int, Box]]] = {}
    transfers = []
    for site in spec:
        if site.module in NOT_SERVABLE and not engine.merged:
            raise RefitError(
                f"{site.name} has no adapter slot in vLLM: {NOT_SERVABLE[site.module]}"
            )
        stage = stages[site.layer]
        pairs: list[tuple[Matrix, tuple[int, ...]]] = [("A", site.shape_A), ("B", site.shape_B)]
        for matrix, shape in pairs:
            # Stages are alike: what goes where within one is the same for all its layers.
            key = (site.module, matrix, shape)
            if key not in known:
                targets = [held(site, matrix, engine, t, kv_heads) for t in range(engine.ranks)]
                known[key] = list(_pairs(site, matrix, stage, targets))
            for holders, target, box in known[key]:
                # Of ranks that hold equal copies, each has its turn: by engine rank and by layer.
                source = stage[holders[(target + site.layer) % len(holders)]].rank
                transfers.append(Transfer(source, target, site, matrix, box))
    return Plan(tuple(transfers), itemsize)


def max_layer(spec: AdapterSpec) -> int:
    return max(site.layer for site in spec) + 1


def _pairs(
    site: Site, matrix: str, stage: list[TrainerRank], targets: list[list[Box]]
) -> Iterator[tuple[list[int], int, Box]]:
    """(places in the stage that hold equal copies, engine rank, box)."""
    holders: dict[Box, list[int]] = {}
    for place, rank in enumerate(stage):
        for box in rank.layout.boxes(site, matrix):
            holders.setdefault(box, []).append(place)
    for target, boxes in enumerate(targets):
        for box, (source, places) in product(boxes, holders.items()):
            if common := source.common(box):
                yield places, target, common


def lacking(
    received: Mapping[tuple[str, int], int], spec: AdapterSpec, engine: EngineLayout
) -> list[str]:
    """What is wrong with the elements that engine ranks receive, `{(tensor, rank): number}`: each
    must get as many of each tensor as it holds."""
    faults = []
    for name, rank, boxes in wanted(spec, engine):
        size = sum(box.size for box in boxes)
        if (found := received.get((name, rank), 0)) != size:
            faults.append(f"{name}: engine rank {rank} gets {found} of {size}")
    return faults


def wanted(spec: AdapterSpec, engine: EngineLayout) -> Iterator[tuple[str, int, list[Box]]]:
    """(tensor, engine rank, what the rank holds of it), of all tensors and ranks."""
    kv_heads = spec.shape.dims.get("kv_heads", 0)
    for site in spec:
        for matrix in ("A", "B"):
            for rank in range(engine.ranks):
                yield f"{site.name}.{matrix}", rank, held(site, matrix, engine, rank, kv_heads)


def received(plan: Plan) -> Counter[tuple[str, int]]:
    """Elements by tensor and engine rank."""
    counts: Counter[tuple[str, int]] = Counter()
    for t in plan.transfers:
        counts[f"{t.site.name}.{t.matrix}", t.target] += t.box.size
    return counts


def held(site: Site, matrix: str, engine: EngineLayout, rank: int, kv_heads: int) -> list[Box]:
    """What engine rank `rank` holds of a canonical tensor of `site`: one box, or of B one of each
    block. `kv_heads` of the model: with fewer than tp, ranks share a head's k and v."""
    if matrix == "A" or not site.blocks:
        return [_held(site, matrix, engine, rank, kv_heads)]
    found, first = [], 0
    names = CUT_AS.get(site.module, (site.module,) * len(site.blocks))
    for name, rows in zip(names, site.blocks, strict=True):
        block = replace(site, module=name, out_features=rows)
        one = _held(block, matrix, engine, rank, kv_heads)
        found.append(Box((first + one.start[0], *one.start[1:]), one.shape))
        first += rows
    return found


def _held(site: Site, matrix: str, engine: EngineLayout, rank: int, kv_heads: int) -> Box:
    shape = site.shape_A if matrix == "A" else site.shape_B
    if engine.merged:
        cut = engine.ep and len(shape) == 3
        return _cut_experts(shape, rank, engine.ranks) if cut else _whole(shape)
    if site.num_experts is not None:
        return _held_experts(site, matrix, shape, engine, rank)
    kind, rank = kind_of(site), rank % engine.tp
    if kind == "column":
        if matrix == "B":
            ways = min(engine.tp, kv_heads) if site.module in ("k_proj", "v_proj") else engine.tp
            return _cut(shape, 0, rank // (engine.tp // ways), ways)
        return _cut_rank(shape, 0, rank, engine) if engine.fully_sharded else _whole(shape)
    if kind == "row":
        if matrix == "A":
            return _cut(shape, 1, rank, engine.tp)
        return _cut(shape, 0, rank, engine.tp) if engine.fully_sharded else _whole(shape)
    return _whole(shape)


def _held_experts(
    site: Site, matrix: str, shape: tuple[int, ...], engine: EngineLayout, rank: int
) -> Box:
    per_expert = len(shape) == 3
    first = 1 if per_expert else 0  # of the dimensions after the experts'
    if engine.ep:
        return _cut_experts(shape, rank, engine.ranks) if per_expert else _whole(shape)
    down = site.module == "experts.down"
    if matrix == ("A" if down else "B"):
        return _cut(shape, first + (1 if down else 0), rank, engine.tp)
    if not engine.fully_sharded:
        return _whole(shape)
    if down:
        return _cut(shape, first, rank, engine.tp)
    return _cut_rank(shape, first, rank, engine)


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def _cut(shape: tuple[int, ...], dim: int, rank: int, ways: int) -> Box:
    if shape[dim] % ways:
        raise RefitError(f"{ways} engine ranks do not divide dimension {dim} of {shape}")
    size = shape[dim] // ways
    return _window(shape, dim, rank * size, size)


def _cut_experts(shape: tuple[int, ...], rank: int, ways: int) -> Box:
    """vLLM's linear placement: what does not divide goes to the first ranks."""
    even, extra = divmod(shape[0], ways)
    start = rank * even + min(rank, extra)
    return _window(shape, 0, start, even + (rank < extra))


def _cut_rank(shape: tuple[int, ...], dim: int, rank: int, engine: EngineLayout) -> Box:
    """Along the slot's rank, of which a smaller adapter fills only the beginning."""
    size = engine.slot_rank // engine.tp
    start = min(rank * size, shape[dim])
    return _window(shape, dim, start, min(size, shape[dim] - start))


def _window(shape: tuple[int, ...], dim: int, start: int, size: int) -> Box:
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim], sizes[dim] = start, size
    return Box(tuple(starts), tuple(sizes))
