"""The dry run of `lora-moe-rl plan --build`: the plan against ranks that are built for real.

Of every pipeline stage the first and the last rank are built (`planner/build_rank.py`), one after
the other in one process, and compared with the plan, which read nothing but the model's config:

    base       names and shapes of every frozen tensor
    counts     parameters of base and adapter that the plan's table shows of the stage
    total      all tensors of all stages, each element counted once, against the published number
    adapters   every part of the canonical adapter: which elements, and where they begin
    refit      what the plan has these ranks send is what they hold, and every engine rank gets
               every element that it needs
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lora_moe_rl.adapters.sharding import Box, kind_of
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.errors import LoraMoeRlError, ModelError
from lora_moe_rl.planner.base import held_by, num_parameters
from lora_moe_rl.planner.facts import Facts
from lora_moe_rl.planner.trainer import RankClass
from lora_moe_rl.refit.plan import (
    EngineLayout,
    Plan,
    TrainerRank,
    lacking,
    make_plan,
    received,
    trainer_ranks,
)
from lora_moe_rl.rollout.facts import slot_rank

if TYPE_CHECKING:
    from lora_moe_rl.planner.build_rank import Builder, BuiltRank

Say = Callable[[str], None]
BF16 = 2
LOG_TAIL = 2000
SHOWN = 3


@dataclass
class Check:
    """One comparison with the plan of a built rank, or (`rank` None) of the whole layout; passed
    without faults."""

    rank: int | None
    what: str
    elements: int
    faults: list[str] = field(default_factory=list)


@dataclass
class BuildReport:
    """`unique_parameters`: of all stages, each element once. `peak_bytes`: resident memory of the
    building process."""

    ranks: list[int]
    checks: list[Check]
    unique_parameters: int
    seconds: float
    peak_bytes: int

    def rows(self) -> list[tuple[str, int, int, bool]]:
        """(what, ranks, elements, passed) of each kind of check."""
        rows = []
        for what in dict.fromkeys(check.what for check in self.checks):
            mine = [check for check in self.checks if check.what == what]
            passed = not any(check.faults for check in mine)
            rows.append((what, len(mine), sum(check.elements for check in mine), passed))
        return rows

    @property
    def passed(self) -> bool:
        return not any(check.faults for check in self.checks)


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
    return BuildReport(ranks, checks, unique, time.perf_counter() - started, peak)


def chosen(trainer: TrainerConfig) -> list[int]:
    """The first and the last rank of each stage."""
    size = trainer.world_size // trainer.pp
    return sorted(
        {n for stage in range(trainer.pp) for n in (stage * size, stage * size + size - 1)}
    )


def adapter_boxes(spec: AdapterSpec, rank: TrainerRank) -> dict[str, Box]:
    """A rank's part of every canonical tensor of its layers, as `adapters/sharding.py` cuts it."""
    return {
        f"{site.name}.{matrix}": Box(*rank.layout.local_range(kind_of(site), matrix, shape))
        for site in spec
        if site.layer in rank.layers
        for matrix, shape in (("A", site.shape_A), ("B", site.shape_B))
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


def compare_adapter(rank: BuiltRank, expected: dict[str, Box]) -> Check:
    """Which elements of each canonical tensor. A part that is not trained (OLoRA) lies beside the
    trained one; together they are the rank's box."""
    parts: dict[str, list[Box]] = defaultdict(list)
    for name, box in rank.adapters:
        parts[name].append(box)
    faults = []
    for name in sorted(parts.keys() | expected.keys()):
        boxes, box = parts.get(name, []), expected.get(name)
        if box is None or not _make_up(boxes, box):
            faults.append(f"{name}: built {boxes or None}, planned {box}")
    elements = _elements(box.shape for _, box in rank.adapters)
    return Check(rank.rank, "adapters", elements, faults)


def _make_up(boxes: list[Box], whole: Box) -> bool:
    """Whether the boxes are all of the whole, and nothing else."""
    inside = all(box.common(whole) == box for box in boxes)
    apart = not any(a.common(b) for i, a in enumerate(boxes) for b in boxes[:i])
    return inside and apart and sum(box.size for box in boxes) == whole.size


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


def unique_parameters(built: Iterable[BuiltRank], trainer: TrainerConfig) -> int:
    """Of all stages, each element once: what a rank holds times the ranks that it is cut over, as
    Megatron marks it."""
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


_builder: Builder | None = None  # of the building process


def _build(
    facts: Facts, spec: AdapterSpec, trainer: TrainerConfig, ranks: list[int], say: Say
) -> tuple[list[BuiltRank], int]:
    """In a process of its own, whose output (Megatron says much) goes to a file."""
    with tempfile.TemporaryDirectory(prefix="lora-moe-rl-plan-") as folder:
        log = Path(folder) / "build.log"
        pool = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            _start,
            (str(log), dict(facts.config), spec, trainer),
        )
        try:
            with pool:
                built = []
                for rank in ranks:
                    say(f"rank {rank} of {trainer.world_size}")
                    built.append(pool.submit(_build_one, rank).result())
                return built, pool.submit(_peak).result()
        except LoraMoeRlError:
            raise
        except (BrokenProcessPool, Exception) as error:
            reason = str(error).strip().splitlines()
            raise ModelError(
                f"{facts.name} cannot be built as planned: {reason[0] if reason else error!r}\n"
                f"{log.read_text()[-LOG_TAIL:] if log.exists() else ''}"
            ) from error


def _start(log: str, config: dict, spec: AdapterSpec, trainer: TrainerConfig) -> None:
    from lora_moe_rl.cluster.log import redirect

    redirect(log)
    from lora_moe_rl.planner.build_rank import Builder

    global _builder
    _builder = Builder(config, spec, trainer)


def _build_one(rank: int) -> BuiltRank:
    assert _builder is not None
    return _builder.build(rank)


def _peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def lines(report: BuildReport) -> Iterator[str]:
    """What is wrong, a line each, and not more than a few of each check."""
    for check in report.checks:
        where = check.what if check.rank is None else f"rank {check.rank}, {check.what}"
        for fault in check.faults[:SHOWN]:
            yield f"{where}: {fault}"
        if len(check.faults) > SHOWN:
            yield f"{where}: and {len(check.faults) - SHOWN} more"
