"""The dry run of `lora-moe-rl plan --build`: the plan against ranks that are built for real.

Of every pipeline stage the first and the last rank are built (`planner/build_rank.py`), one after
the other in one process, and compared with the plan, which read nothing but the model's config:

    base       names and shapes of every frozen tensor
    counts     parameters of base and adapter that the plan's table shows of the stage
    total      all tensors of all stages, each element counted once, against the published number
    adapters   every part of the canonical adapter: which elements, and where they begin
    refit      what the plan has these ranks send is what they hold, and every engine rank gets
               every element that it needs
    engine     of an engine whose ranks share the experts out: those that vLLM gives each rank are
               those that the plan counts and the refit sends
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.errors import ActorFailed, ModelError
from lora_moe_rl.planner.base import base_tensors, held_by, num_parameters
from lora_moe_rl.planner.build_engine import vllm_experts
from lora_moe_rl.planner.facts import Facts
from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.rollout import engine_shape
from lora_moe_rl.planner.trainer import RankClass
from lora_moe_rl.refit.plan import (
    EngineLayout,
    Plan,
    TrainerRank,
    lacking,
    make_plan,
    received,
    trainer_ranks,
    wanted,
)
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.verify import report
from lora_moe_rl.verify.processes import Processes, run_processes
from lora_moe_rl.verify.report import Report, Say

if TYPE_CHECKING:
    from lora_moe_rl.planner.build_rank import Builder, BuiltRank

BF16 = 2
BUILD_S = 3600  # longest wait for one rank
SHOWN = 3


@dataclass
class Check:
    """One comparison with the plan of a built rank, or (`rank` None) of the whole layout. `wrong`
    has a sentence for each thing that differs."""

    rank: int | None
    what: str
    elements: int
    wrong: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.what if self.rank is None else f"rank {self.rank}, {self.what}"

    @property
    def passed(self) -> bool:
        return not self.wrong

    def faults(self) -> Iterator[str]:
        """Not more than a few."""
        return report.first(self.wrong, SHOWN)


@dataclass
class BuildReport(Report):
    """`unique_parameters`: of all stages, each element once. `peak_bytes`: resident memory of the
    building process."""

    ranks: list[int]
    rows: list[Check]
    unique_parameters: int
    seconds: float
    peak_bytes: int

    def parts(self) -> Iterator[Any]:
        title = (
            f"built without values: {len(self.ranks)} ranks, {self.seconds:.0f} s, "
            f"{self.peak_bytes / GIB:.2f} GiB; parameters, each once: {self.unique_parameters:,}"
        )
        table = report.table(["", "checks", "elements", ""], title)
        for what in dict.fromkeys(check.what for check in self.rows):
            mine = [check for check in self.rows if check.what == what]
            elements = f"{sum(check.elements for check in mine):,}"
            verdict = report.verdict(all(check.passed for check in mine))
            table.add_row(what, str(len(mine)), elements, verdict)
        yield table

    def figures(self) -> dict[str, Any]:
        checks = [
            {"rank": c.rank, "what": c.what, "elements": c.elements, "faults": c.wrong}
            for c in self.rows
        ]
        head = {key: value for key, value in vars(self).items() if key != "rows"}
        return head | {"checks": checks, "passed": self.passed}


def check(
    facts: Facts, spec: AdapterSpec, config: RunConfig, classes: Sequence[RankClass], say: Say
) -> BuildReport:
    """Builds and compares; `classes`: what the plan says of the stages. Raises ModelError when a
    rank cannot be built."""
    started = time.perf_counter()
    trainer = config.trainer
    ranks = chosen(trainer)
    engine = EngineLayout.of(config.rollout, slot_rank(spec), config.refit.mode == "merged")
    plan = make_plan(spec, trainer, engine, BF16)
    planned = {stage: rank_class for rank_class in classes for stage in rank_class.stages}
    built, peak = _build(facts, spec, trainer, ranks, say)
    places = trainer_ranks(trainer, spec.shape.num_layers)
    checks = []
    for rank in built:
        expected = {t.name: box.shape for t, box in held_by(facts, places[rank.rank]).items()}
        checks.append(compare_base(rank, expected))
        stage = rank.rank // (trainer.world_size // trainer.pp)
        checks.append(compare_counts(rank, planned[stage]))
        checks.append(compare_adapter(rank, adapter_boxes(spec, places[rank.rank])))
        checks.append(compare_refit(rank, plan))
    unique = unique_parameters(built, trainer)
    checks.append(_total(facts, unique))
    checks.append(completeness(plan, spec, engine))
    if engine.ep and engine.ranks > 1 and spec.shape.num_experts:
        say(f"experts of {engine.ranks} engine ranks")
        checks.append(compare_experts(facts, spec, engine, _by_vllm(engine, spec)))
    return BuildReport(ranks, checks, unique, time.perf_counter() - started, peak)


def chosen(trainer: TrainerConfig) -> list[int]:
    """The first and the last rank of each stage."""
    size = trainer.world_size // trainer.pp
    return sorted(
        {n for stage in range(trainer.pp) for n in (stage * size, stage * size + size - 1)}
    )


def adapter_boxes(spec: AdapterSpec, rank: TrainerRank) -> dict[str, list[Box]]:
    """A rank's parts of every canonical tensor of its layers, as `adapters/sharding.py` cuts it."""
    return {
        f"{site.name}.{matrix}": rank.layout.boxes(site, matrix)
        for site in spec
        if site.layer in rank.layers
        for matrix in "AB"
    }


def compare_base(rank: BuiltRank, expected: dict[str, tuple[int, ...]]) -> Check:
    """Names and shapes of the frozen tensors."""
    faults = []
    for name in sorted(rank.base.keys() | expected.keys()):
        if rank.base.get(name) != expected.get(name):
            faults.append(f"{name}: built {rank.base.get(name)}, planned {expected.get(name)}")
    return Check(rank.rank, "base", _elements(rank.base.values()), faults)


def compare_counts(rank: BuiltRank, planned: RankClass) -> Check:
    """The numbers of the plan's table."""
    base = {n: shape for n, shape in rank.base.items() if not n.endswith(".expert_bias")}
    pairs = (
        ("base", _elements(base.values()), planned.base_parameters),
        ("adapter", _elements(box.shape for _, box in rank.adapters), planned.adapter_parameters),
    )
    faults = [f"{what}: built {a:,}, planned {b:,}" for what, a, b in pairs if a != b]
    return Check(rank.rank, "counts", sum(built for _, built, _ in pairs), faults)


def compare_adapter(rank: BuiltRank, expected: dict[str, list[Box]]) -> Check:
    """Which elements of each canonical tensor. A part that is not trained (`adapter.init`) lies
    beside the trained one; together they are the rank's boxes."""
    parts: dict[str, list[Box]] = defaultdict(list)
    for name, box in rank.adapters:
        parts[name].append(box)
    faults = []
    for name in sorted(parts.keys() | expected.keys()):
        boxes, planned = parts.get(name, []), expected.get(name)
        if planned is None or not _make_up(boxes, planned):
            faults.append(f"{name}: built {boxes or None}, planned {planned}")
    elements = _elements(box.shape for _, box in rank.adapters)
    return Check(rank.rank, "adapters", elements, faults)


def _make_up(boxes: list[Box], wholes: list[Box]) -> bool:
    """Whether the boxes are all of the wholes, which are apart, and nothing else."""
    inside = all(any(box.common(whole) == box for whole in wholes) for box in boxes)
    apart = not any(a.common(b) for i, a in enumerate(boxes) for b in boxes[:i])
    return inside and apart and sum(box.size for box in boxes) == sum(one.size for one in wholes)


def compare_refit(rank: BuiltRank, plan: Plan) -> Check:
    """Everything that the rank is planned to send, it holds."""
    parts: dict[str, list[Box]] = defaultdict(list)
    for name, box in rank.adapters:
        parts[name].append(box)
    faults, elements = [], 0
    for transfer in plan.transfers:
        if transfer.source != rank.rank:
            continue
        name = f"{transfer.site.name}.{transfer.matrix}"
        common = [c for box in parts[name] if (c := box.common(transfer.box))]
        elements += transfer.box.size
        if sum(box.size for box in common) != transfer.box.size:
            faults.append(f"{name}: sends {transfer.box}, holds {parts[name] or None}")
    return Check(rank.rank, "refit", elements, faults)


def completeness(plan: Plan, spec: AdapterSpec, engine: EngineLayout) -> Check:
    """Every engine rank gets as many elements of each tensor as it holds."""
    counts = received(plan)
    return Check(None, "refit, all", sum(counts.values()), lacking(counts, spec, engine))


def compare_experts(
    facts: Facts, spec: AdapterSpec, engine: EngineLayout, served: Sequence[Sequence[int]]
) -> Check:
    """`served`: the experts of each engine rank. Those of the adapter's sites, and on the first
    rank, of which the plan's table is, as many of the base."""
    tensors = [tensor for tensor in base_tensors(facts) if tensor.part == "experts"]
    faults, elements = [], 0
    for tensor in tensors:
        planned = engine_shape(facts, tensor, engine.tp, engine.ep, engine.dp)
        elements += math.prod(planned)
        if planned[0] != len(served[0]):
            faults.append(f"{tensor.name}: vLLM has {len(served[0])}, planned {planned[0]}")
    for name, rank, (box, *_) in wanted(spec, engine):
        if ".experts." not in name or len(box.shape) < 3:
            continue
        elements += box.size
        planned = range(box.start[0], box.start[0] + box.shape[0])
        if list(planned) != list(served[rank]):
            faults.append(f"{name}, engine rank {rank}: vLLM has {served[rank]}, planned {planned}")
    return Check(None, "engine", elements, faults)


def _by_vllm(engine: EngineLayout, spec: AdapterSpec) -> list[list[int]]:
    asked = engine.ranks, spec.shape.num_experts
    (served,) = run_processes(1, vllm_experts, *asked, timeout_s=BUILD_S)
    return served


def unique_parameters(built: Iterable[BuiltRank], trainer: TrainerConfig) -> int:
    """Parameters of all stages, each element once: what a rank holds times the ranks that it is cut
    over, as Megatron marks it."""
    stages = {rank.rank // (trainer.world_size // trainer.pp): rank for rank in built}
    return sum(
        math.prod(shape) * rank.ways[name]
        for rank in stages.values()
        for name, shape in rank.base.items()
    )


def _total(facts: Facts, unique: int) -> Check:
    planned = num_parameters(facts)
    faults = [] if unique == planned else [f"built {unique:,}, planned {planned:,}"]
    return Check(None, "parameters, all", unique, faults)


def _elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _build(
    facts: Facts, spec: AdapterSpec, trainer: TrainerConfig, ranks: list[int], say: Say
) -> tuple[list[BuiltRank], int]:
    """Builds in a process of its own, whose output (Megatron says much) goes to its log."""
    arguments = (dict(facts.config), spec, trainer)
    built = []
    try:
        with Processes(["builder"], _builder, *arguments) as process:
            for rank in ranks:
                say(f"rank {rank} of {trainer.world_size}")
                built += process.call("build", rank, timeout_s=BUILD_S)
            (peak,) = process.call("peak", timeout_s=BUILD_S)
    except ActorFailed as error:
        raise ModelError(
            f"{facts.name} cannot be built as planned: {error.reason}\n{error.log_tail}"
        ) from error
    return built, peak


def _builder(index: int, *args: Any) -> Builder:
    from lora_moe_rl.planner.build_rank import Builder

    return Builder(*args)
