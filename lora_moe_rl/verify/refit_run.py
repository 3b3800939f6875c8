"""`lora-moe-rl verify refit`: what real vLLM serves after a refit, against two others.

Hugging Face ──> sequences, logprobs of merged weights and of the base
each engine ──> its base; the adapter from files, by vLLM's own loader, into a slot
   each trainer, transport ──> refit ──> logprobs and routes ──> the trainer's with these routes
                                    └──> slots, against what vLLM's loader put into its own
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ActorFailed, LoraMoeRlError
from lora_moe_rl.refit.parts import STORAGE, part_layouts
from lora_moe_rl.refit.plan import make_plan
from lora_moe_rl.refit.transports import choose
from lora_moe_rl.rollout.facts import served_module
from lora_moe_rl.verify.inputs import random_adapter
from lora_moe_rl.verify.layouts import Layout
from lora_moe_rl.verify.ranks import run_processes
from lora_moe_rl.verify.refit_plan import Combination, Engine, Fault
from lora_moe_rl.verify.refit_processes import EngineProcess, Ranks

Say = Callable[[str], None]
Scores = Sequence[np.ndarray]
# Largest |difference of logprobs|, by device and dtype; only the first has been measured.
TOLERANCES = {
    ("cpu", "float32"): 5e-6,
    ("cuda", "float32"): 1e-4,
    ("cpu", "bfloat16"): 0.15,
    ("cuda", "bfloat16"): 0.15,
}
# Of a value in a slot, relative to the largest of its tensor: vLLM scales B in another order.
SLOT_TOLERANCES = {"float32": 1e-6, "bfloat16": 1e-2}
EFFECT = 100  # the adapter must change each sequence by so many times the tolerance


@dataclass
class Row:
    """One refit, or an engine's base, where there is neither trainer nor transport.

    trainer_error, merged_error: largest |difference of logprobs| to the trainer and to the merged
    weights; effect: to the engine's own base, of the sequence with the least. `unlike`: tensors of
    a slot that are not as vLLM's own loader has them. None is what was not come to."""

    engine: str
    trainer: str = ""
    transport: str = ""
    trainer_error: float | None = None
    merged_error: float | None = None
    effect: float | None = None
    unlike: list[dict[str, Any]] | None = None
    nbytes: int = 0
    publish_seconds: float = 0.0
    seconds: float = 0.0
    failure: str | None = None


@dataclass
class Report:
    model: str
    expert_layout: str
    device: str
    dtype: str
    tolerance: float
    sequences: int = 0
    tokens: int = 0
    noise: float = 0.0  # what another last bit changes of Hugging Face's logprobs
    rows: list[Row] = field(default_factory=list)
    experts: tuple[int, int] = (0, 0)  # that a token went to, and all, over the MoE layers
    seconds: float = 0.0

    def passed(self, row: Row) -> bool:
        return row.failure is None and not self.faults(row)

    def faults(self, row: Row) -> list[str]:
        """What is wrong with a row. NaN is."""
        found = []
        theirs = (
            ("the trainer's", row.trainer_error),
            ("those of the merged weights", row.merged_error),
        )
        for whose, error in theirs:
            if error is not None and not error <= self.tolerance:
                found.append(f"logprobs differ from {whose} by {error:.2g}")
        least = EFFECT * self.tolerance
        if row.effect is not None and not row.effect >= least:
            found.append(f"logprobs differ from the base's by {row.effect:.2g} only")
        for unlike in row.unlike or ():
            experts = unlike["experts"]
            which = "" if experts is None else f", experts {', '.join(map(str, experts))} of it"
            found.append(
                f"{unlike['tensor']} is not in its slot on engine rank {unlike['worker']}{which} "
                f"(off by {unlike['error']:.2g} of its largest value)"
            )
        return found

    @property
    def all_passed(self) -> bool:
        return all(self.passed(row) for row in self.rows)


@dataclass
class RefitVerification:
    """One run of the command."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    engines: list[Engine]
    trainers: list[Layout]
    combinations: list[Combination]
    samples: int
    timeout_s: float = 600
    fault: Fault | None = None
    say: Say = lambda text: None

    @property
    def merged(self) -> bool:
        """Whether engines serve merged weights; then there are no slots to look at."""
        return self.config.refit.mode == "merged"

    def run(self) -> Report:
        started = time.perf_counter()
        trainer = self.config.trainer
        self.report = Report(
            self.config.model.path,
            self.config.adapter.expert_layout,
            trainer.device,
            trainer.dtype,
            TOLERANCES[trainer.device, trainer.dtype],
        )
        self.versions = itertools.count()
        self.used: set[tuple[int, int]] = set()
        with tempfile.TemporaryDirectory(prefix="lora-moe-rl-verify-") as folder:
            self.folder = Path(folder)
            self._prepare()
            for engine in self.engines:
                self._engine(engine)
        shape = self.spec.shape
        self.report.experts = (len(self.used), len(shape.moe_layers) * shape.num_experts)
        self.report.seconds = time.perf_counter() - started
        return self.report

    def _prepare(self) -> None:
        """The adapter, and what Hugging Face says of it. Raises what stops it."""
        self.say("Hugging Face, with the adapter merged by hand")
        seed = self.config.seed + 1
        self.tensors = random_adapter(self.spec, seed)
        least = 10 * EFFECT * self.report.tolerance  # an engine has room for rounding
        arguments = (self.model_dir, self.spec, self.tensors, self.samples, seed, least)
        (self.reference,) = run_processes(
            1, run_reference, *arguments, cuda=False, timeout_s=self.timeout_s
        )
        self.report.sequences = len(self.reference.sequences)
        self.report.tokens = sum(map(len, self.reference.sequences))
        self.report.noise = self.reference.noise
        if not self.merged:
            peft.write(self.folder / "files", self.spec, self.tensors, self.config)
            self.names = {served_module(self.spec.shape, site)[:2]: site.name for site in self.spec}

    def _engine(self, engine: Engine) -> None:
        """The rows of one engine; when it fails, the first row says so and there are no more."""
        self.say(f"starting engine {engine.name}")
        row = Row(engine.name)
        self.report.rows.append(row)
        log = self.folder / f"{engine.name}.log"
        try:
            with EngineProcess(engine.config, self.spec, self.model_dir, log) as process:
                with _timed(row):
                    self.facts = process.start()
                    scores, _ = process.call("score", self.reference.sequences, None)
                    row.merged_error = largest(scores, self.reference.base)
                    if not self.merged:
                        process.call("load_files", str(self.folder / "files"))
                self.base = scores
                self._trainers(engine, process)
        except LoraMoeRlError as error:
            row.failure = str(error)

    def _trainers(self, engine: Engine, process: EngineProcess) -> None:
        cuda = self.config.trainer.device == "cuda"
        for layout in self.trainers:
            transports = [c[2] for c in self.combinations if c[:2] == (engine.name, layout.name)]
            rows = [Row(engine.name, layout.name, transport) for transport in transports]
            self.report.rows.extend(rows)
            try:
                with Ranks(layout.config, self.model_dir, cuda, self.timeout_s) as ranks:
                    ranks.call("set_adapter", self.tensors)
                    for row in rows:
                        self.say(f"{row.engine}, {row.trainer}, {row.transport}")
                        with _timed(row):
                            self._refit(row, engine, layout, process, ranks)
            except LoraMoeRlError as error:
                for row in rows:
                    if row.merged_error is None and row.failure is None:
                        row.failure = str(error)

    def _refit(
        self, row: Row, engine: Engine, layout: Layout, process: EngineProcess, ranks: Ranks
    ) -> None:
        version = next(self.versions)
        plan = make_plan(
            self.spec,
            layout.config.trainer,
            engine.layout(self.spec),
            STORAGE[self.facts["dtype"]].itemsize,
        )
        if self.fault is not None:
            plan = self.fault(plan, engine.layout(self.spec))
        layouts = part_layouts(plan, self.spec, self.facts["dtype"])
        path = str(self.folder / "refits") if row.transport == "directory" else None
        settings = {"refit": {"transport": row.transport, "directory": path}}
        refit = with_settings(self.config, settings).refit
        channel = choose(refit, ranks.call("place"), [self.facts["place"]])
        process.call("prepare_refit", layouts, channel)
        started = time.perf_counter()
        answers = ranks.call("send", version, layouts, channel)
        sent = [part for part in answers if part is not None]
        channel.published(lambda: sent)
        receipt = process.call("publish", version, *sent)
        row.nbytes, row.publish_seconds = receipt.bytes, time.perf_counter() - started
        if self.merged:
            if differing := process.call("differing", version, *sent):
                row.failure = f"not base + adapter: {', '.join(differing)}"
        else:
            row.unlike = process.call(
                "unlike_files", version, self.names, SLOT_TOLERANCES[self.facts["dtype"]]
            )
        scores, table = process.call("score", self.reference.sequences, version)
        if not self.merged:
            process.call("drop", version)
        row.merged_error = largest(scores, self.reference.merged)
        row.effect = min(largest([a], [b]) for a, b in zip(scores, self.base, strict=True))
        if table.coverage < 1:
            row.failure = f"{1 - table.coverage:.1%} of the routes were not recorded"
        self.used |= experts_used(table)
        theirs = ranks.call("score", self.reference.sequences, table)
        row.trainer_error = largest(scores, next(t for t in theirs if t is not None))


def run_reference(rank: int, *args: Any):
    """In the process of its own, which has torch."""
    from lora_moe_rl.verify.refit_reference import reference

    return reference(rank, *args)


def largest(ours: Scores, theirs: Scores) -> float:
    """Largest |difference|, NaN when either has one."""
    pairs = zip(ours, theirs, strict=True)
    return float(np.max([np.abs(a.astype(np.float64) - b).max() for a, b in pairs]))


def experts_used(table) -> set[tuple[int, int]]:
    """(MoE layer, expert) that a token went to."""
    used = set()
    for place, layer in enumerate(table.layers):
        used |= {(layer, int(expert)) for expert in np.unique(table.ids[:, place])}
    return used


@contextmanager
def _timed(row: Row) -> Iterator[None]:
    """Notes its seconds. A refusal becomes the row's failure, and the next row follows; after
    processes have ended there is none."""
    started = time.perf_counter()
    try:
        yield
    except ActorFailed:
        raise
    except LoraMoeRlError as error:
        row.failure = str(error)
    finally:
        row.seconds = time.perf_counter() - started
