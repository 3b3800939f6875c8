"""`lora-moe-rl verify refit`: what real vLLM serves after a refit, against two others.

Hugging Face ──> sequences, logprobs of merged weights and of the base
each engine ──> its base; the adapter from files, by vLLM's own loader, into a slot
   each trainer, transport ──> refit ──> logprobs and routes ──> one rank's with these routes
                                    │                        └──> the trainer's, against one rank's
                                    │                             and against vLLM's
                                    └──> slots, against what vLLM's loader put into its own
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ActorFailed, LoraMoeRlError
from lora_moe_rl.refit.parts import STORAGE, SentPart, part_layouts
from lora_moe_rl.refit.plan import make_plan
from lora_moe_rl.refit.transports import choose
from lora_moe_rl.rollout.facts import served_parts
from lora_moe_rl.verify import refit_jobs, vllm_files
from lora_moe_rl.verify.comparisons import largest
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.inputs import random_adapter
from lora_moe_rl.verify.layouts import Layout
from lora_moe_rl.verify.processes import run_processes
from lora_moe_rl.verify.ranks import Ranks
from lora_moe_rl.verify.refit_plan import Combination, Engine, Fault
from lora_moe_rl.verify.refit_report import EFFECT, ROOM, TOLERANCES, Report, Row
from lora_moe_rl.verify.report import Say, timed

# Of a value in a slot, relative to the largest of its tensor: vLLM scales B in another order.
SLOT_TOLERANCES = {"float32": 1e-6, "bfloat16": 1e-2}


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
    left_out: list[str] = field(default_factory=list)
    say: Say = lambda text: None

    @property
    def merged(self) -> bool:
        """Whether engines serve merged weights; then there are no slots to look at."""
        return self.config.refit.mode == "merged"

    @property
    def _least_effect(self) -> float:
        return EFFECT[self.config.trainer.dtype] * self.report.tolerance

    def run(self) -> Report:
        started = time.perf_counter()
        trainer = self.config.trainer
        self.report = Report(
            self.config.model.path,
            self.config.adapter.expert_layout,
            trainer.device,
            trainer.dtype,
            TOLERANCES[trainer.device, trainer.dtype],
            left_out=self.left_out,
        )
        self.versions = itertools.count()
        self.used: set[tuple[int, int]] = set()
        with tempfile.TemporaryDirectory(prefix="lora-moe-rl-verify-") as folder:
            self.folder = Path(folder)
            self._prepare()
            life_s = self.timeout_s * len(self.engines) * (1 + len(self.trainers))
            with Ranks(self.config, self.model_dir, trainer.device == "cuda", life_s) as self.alone:
                self.alone.run(refit_jobs.set_adapter, self.tensors)
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
        least = ROOM[self.config.trainer.dtype] * self._least_effect
        arguments = (self.model_dir, self.spec, self.tensors, self.samples, seed, least)
        (self.reference,) = run_processes(1, run_reference, *arguments, timeout_s=self.timeout_s)
        self.report.sequences = len(self.reference.sequences)
        self.report.tokens = sum(map(len, self.reference.sequences))
        self.report.noise = self.reference.noise
        if not self.merged:
            vllm_files.write(self.folder / "files", self.spec, self.tensors, self.config)
            served = [(served_parts(self.spec.shape, site), site.name) for site in self.spec]
            self.names = {(path, i): name for (path, parts), name in served for i in parts}

    def _engine(self, engine: Engine) -> None:
        """The rows of one engine; when it fails, the first row says so and there are no more."""
        self.say(f"starting engine {engine.name}")
        (row,) = self._rows(engine.name)
        log = self.folder / f"{engine.name}.log"
        try:
            with EngineProcess(engine.config, self.spec, self.model_dir, log) as process:
                with timed(row, fatal=LoraMoeRlError):  # there are no refits without it
                    self.facts = process.start()
                    scores, _ = process.ask("score", self.reference.sequences, None)
                    row.merged_error = largest(scores, self.reference.base)
                    if not self.merged:
                        process.ask("load_files", str(self.folder / "files"))
                self.base = scores
                self._trainers(engine, process)
        except LoraMoeRlError as error:
            row.failure = str(error)

    def _rows(self, engine: str, *refits: tuple[str, str]) -> list[Row]:
        """New rows of the report, one for each refit (trainer, transport), or the base's."""
        allowed: dict[str, Any] = {
            "tolerance": self.report.tolerance,
            "least_effect": self._least_effect,
            "merged": self.merged,
        }
        rows = [Row(engine, *place, **allowed) for place in refits or (("", ""),)]
        self.report.rows.extend(rows)
        return rows

    def _trainers(self, engine: Engine, process: EngineProcess) -> None:
        cuda = self.config.trainer.device == "cuda"
        for layout in self.trainers:
            transports = [c[2] for c in self.combinations if c[:2] == (engine.name, layout.name)]
            rows = self._rows(engine.name, *((layout.name, kind) for kind in transports))
            try:
                with Ranks(layout.config, self.model_dir, cuda, self.timeout_s) as ranks:
                    ranks.run(refit_jobs.set_adapter, self.tensors)
                    for row in rows:
                        self.say(f"{row.engine}, {row.trainer}, {row.transport}")
                        with timed(row, fatal=ActorFailed):
                            self._refit(row, engine, layout, process, ranks)
            except LoraMoeRlError as error:
                for row in rows:
                    if row.missing() and row.failure is None:
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
        channel = choose(refit, ranks.run(refit_jobs.place), [self.facts["place"]])
        process.ask("prepare_refit", layouts, channel)
        started = time.perf_counter()
        answers = ranks.run(refit_jobs.send, version, layouts, channel)
        sent = [part for part in answers if part is not None]
        asyncio.run(channel.published(lambda: _at_hand(sent)))
        receipt = process.ask("publish", version, *sent)
        row.nbytes, row.publish_seconds = receipt.bytes, time.perf_counter() - started
        if self.merged:
            if differing := process.ask("differing", version, *sent):
                row.failure = f"not base + adapter: {', '.join(differing)}"
        else:
            row.unlike = process.ask(
                "unlike_files", version, self.names, SLOT_TOLERANCES[self.facts["dtype"]]
            )
        scores, table = process.ask("score", self.reference.sequences, version)
        if not self.merged:
            process.ask("drop", version)
        row.merged_error = largest(scores, self.reference.merged)
        row.effect = min(largest([a], [b]) for a, b in zip(scores, self.base, strict=True))
        if table.coverage < 1:
            row.failure = f"{1 - table.coverage:.1%} of the routes were not recorded"
        self.used |= experts_used(table)
        (alone,) = self.alone.run(refit_jobs.score, self.reference.sequences, table)
        row.trainer_error = largest(scores, alone)
        answered = ranks.run(refit_jobs.score, self.reference.sequences, table)
        theirs = next(one for one in answered if one is not None)
        row.ranks_error = largest(theirs, alone)
        row.direct_error = largest(scores, theirs)
        if (exact := self.reference.exact) is not None:
            every = ("engine", scores), ("one rank", alone), ("trainer", theirs)
            row.from_exact = {who: largest(found, exact) for who, found in every}


def run_reference(rank: int, *args: Any):
    """In the process of its own, which has torch."""
    from lora_moe_rl.verify.refit_reference import reference

    return reference(rank, *args)


def experts_used(table) -> set[tuple[int, int]]:
    """(MoE layer, expert) that a token went to."""
    used = set()
    for place, layer in enumerate(table.layers):
        used |= {(layer, int(expert)) for expert in np.unique(table.ids[:, place])}
    return used


async def _at_hand(sent: list[SentPart]) -> list[SentPart]:
    return sent
