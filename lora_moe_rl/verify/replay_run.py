"""The stages of `verify replay`: vLLM records, Hugging Face judges, Megatron replays.

vLLM, each condition ──> sequences, logprobs, routes ──> Hugging Face's own routes of the tokens
                                    │
                                    ├──> Hugging Face's float64 with these routes: logprobs
                                    └──> each layout: dispatchers' maps, logprobs
                                                      with the recorded routes,
                                                      with routes that no router would choose,
                                                      with routes that are slightly wrong
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.verify import replay_ranks, replay_record, replay_spread, replay_tables
from lora_moe_rl.verify.comparisons import Distance, largest_scaled, last, scaled
from lora_moe_rl.verify.inputs import random_adapter
from lora_moe_rl.verify.layouts import Layout
from lora_moe_rl.verify.processes import apart, run_processes
from lora_moe_rl.verify.ranks import run_ranks
from lora_moe_rl.verify.refit_plan import Engine
from lora_moe_rl.verify.replay_ranks import Replayed, Used
from lora_moe_rl.verify.replay_record import Recording
from lora_moe_rl.verify.replay_report import (
    COMPARED,
    TOLERANCE,
    RecordRow,
    ReplayRow,
    Report,
    allowed,
)
from lora_moe_rl.verify.replay_tables import SHIFTS, shifts_of
from lora_moe_rl.verify.report import Say, timed

if TYPE_CHECKING:
    from lora_moe_rl.verify.replay_reference import Expected


@dataclass
class Group:
    """Recordings that are replayed together: all of the base, or all under the adapter."""

    adapter: bool
    sequences: list[list[int]]
    rollout: list[np.ndarray]  # vLLM's logprobs of the response tokens
    table: RouteTable
    other: RouteTable
    expected: list[np.ndarray] = field(default_factory=list)  # in float64, with `table`
    expected_other: list[np.ndarray] = field(default_factory=list)


@dataclass
class Verification:
    """One run of the command. `layouts`: with or without recomputation, as their configs say.
    `engines`: those stepped by hand; `spread`: one of two data-parallel ranks."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    layouts: list[Layout]
    engines: Sequence[str]
    samples: int = 16
    timeout_s: float = 600
    tolerance: float = TOLERANCE
    spread: Engine | None = None
    say: Say = lambda text: None

    def run(self) -> Report:
        started = time.perf_counter()
        tensors = random_adapter(self.spec, self.config.seed + 1)
        self.say("vLLM records")
        recordings = self._record(tensors)
        groups = [g for adapter in (False, True) if (g := _group(recordings, adapter))]
        self.say("Hugging Face")
        records = self._judge(recordings, groups, tensors)
        rows = []
        for layout in self.layouts:
            self.say(f"{layout.name} ({layout.world_size} ranks)")
            rows.append(self._replay(layout, groups, tensors))
        return Report(
            self.config.model.path,
            records,
            self.rounding,
            self.allowed,
            replay_tables.moved(groups[0].other, groups[0].table),
            rows,
            time.perf_counter() - started,
        )

    def _record(self, tensors) -> list[Recording]:
        arguments = (self.config, self.spec, self.model_dir, tensors, self.samples, self.engines)
        stages = 1 + len(self.engines)
        found = apart(
            "vLLM", replay_record.record, *arguments, self.timeout_s,
            timeout_s=stages * self.timeout_s,
        )  # fmt: skip
        if self.spread is not None:
            common = (self.spec, self.model_dir, tensors, self.samples)
            with tempfile.TemporaryDirectory(prefix="lora-moe-rl-verify-") as folder:
                log = Path(folder) / "engine.log"
                found += replay_spread.record(self.spread.config, *common, log, self.timeout_s)
        return found

    def _judge(self, recordings: list[Recording], groups: list[Group], tensors) -> list[RecordRow]:
        arguments = (self.model_dir, self.spec, tensors, recordings, groups)
        ((rows, expected),) = run_processes(1, judge, *arguments, timeout_s=self.timeout_s)
        for group, found in zip(groups, expected, strict=True):
            group.expected, group.expected_other = found.exact
        own = own_rounding(rows, expected)
        self.rounding = own.all
        self.allowed = {name: allowed(self.tolerance, one) for name, one in own.replays.items()}
        return [
            replace(row, allowed=allowed(self.tolerance, one))
            for row, one in zip(rows, own.records, strict=True)
        ]

    def _replay(self, layout: Layout, groups: list[Group], tensors) -> ReplayRow:
        possible = shifts_of(groups[-1].table)
        row = ReplayRow(layout.name, layout.world_size, shifts=possible, allowed=self.allowed)
        tasks = _tasks(groups)
        with timed(row):
            by_rank = run_ranks(
                layout.config,
                self.model_dir,
                replay_ranks.replay,
                tensors,
                tasks,
                layout.config.trainer.recompute == "full",
                timeout_s=self.timeout_s,
            )
            for task, used in zip(tasks, zip(*by_rank, strict=True), strict=True):
                _add(row, task, used, groups)
        return row


def _group(recordings: Sequence[Recording], adapter: bool) -> Group | None:
    mine = [r for r in recordings if r.adapter == adapter and r.table is not None]
    if not mine:
        return None
    table = RouteTable.concat([r.table for r in mine if r.table is not None])
    return Group(
        adapter,
        [sequence for r in mine for sequence in r.sequences],
        [logprobs for r in mine for logprobs in r.logprobs],
        table,
        replay_tables.permuted(table, seed=1),
    )


def judge(
    rank: int, model_dir: Path, spec: AdapterSpec, tensors, recordings, groups
) -> tuple[list[RecordRow], list[Any]]:
    """A process's job: (a row of each recording, `replay_reference.Expected` of each group)."""
    from lora_moe_rl.verify import hf
    from lora_moe_rl.verify.replay_reference import HuggingFace, expected

    rows, found = [RecordRow(recording) for recording in recordings], []
    for group in groups:
        merged = tensors if group.adapter else None
        model = hf.load(model_dir)
        if merged is not None:
            hf.merge(model, spec, merged)
        single, tables = HuggingFace(model, spec), (group.table, group.other)
        found.append(expected(single, model_dir, merged, group.sequences, tables))
        exact, in_float32 = iter(found[-1].exact[0]), iter(found[-1].single[0])
        for row in rows:
            recording = row.recording
            if recording.table is None or recording.adapter != group.adapter:
                continue
            routes = single.compare(recording.sequences, *replay_tables.rows_of(recording.table))
            row.routes, row.ties, row.differences = routes.routes, routes.ties, routes.differences
            count = len(recording.sequences)
            theirs = list(itertools.islice(exact, count))
            row.error = Distance.of(scaled(theirs, recording.logprobs))
            if found[-1].in_float64:
                own = list(itertools.islice(in_float32, count))
                row.rounding = scaled(own, last(theirs, recording.logprobs))
    return rows, found


@dataclass(frozen=True)
class OwnRounding:
    """How far Hugging Face's float32 is from its float64: on all tokens, on those of each record,
    and on those of each comparison of the replays. None without a float64 forward. The worst token
    is of all tokens each time."""

    all: Distance | None
    records: Sequence[Distance | None]
    replays: Mapping[str, Distance | None]


def own_rounding(rows: Sequence[RecordRow], expected: Sequence[Expected]) -> OwnRounding:
    """`rows` and `expected` as `judge` returns them.

    On the same tokens: an error is relative to a logprob beyond -1, so that tokens of a random
    prompt (logprobs of -17 in a trained model) have a tenth of the error of those that were
    sampled, and say nothing of them.
    """
    if not all(found.in_float64 for found in expected):
        return OwnRounding(None, [None] * len(rows), dict.fromkeys(COMPARED))
    recorded, other = zip(*(found.rounding() for found in expected), strict=True)
    whole = Distance.of(*recorded, *other)

    def on(*some: Sequence[np.ndarray]) -> Distance:
        """Of groups of tokens: of each by itself, as the errors are taken."""
        most = max(Distance.of(*one).most for one in some if len(one))
        return Distance(whole.worst, most)

    known = {
        adapter: [
            row.rounding
            for row in rows
            if row.rounding is not None and row.recording.adapter == adapter
        ]
        for adapter in (False, True)
    }
    replays = {
        "vLLM": on(*known.values()),
        "float64": on(*([one] for one in recorded)),
        "other experts": on(*([one] for one in other)),
    }
    records = [None if row.rounding is None else on([row.rounding]) for row in rows]
    return OwnRounding(whole, records, replays)


def _tasks(groups: Sequence[Group]) -> list[Replayed]:
    tasks = []
    for group in groups:
        common: dict[str, Any] = {"sequences": group.sequences, "adapter": group.adapter}
        tasks += [
            Replayed("recorded", table=group.table, truth=group.table, **common),
            Replayed("other experts", table=group.other, truth=group.other, **common),
        ]
    # Under the adapter: without one there is nothing to train.
    last = groups[-1]
    common = {"sequences": last.sequences, "adapter": last.adapter}
    tasks.append(Replayed("a step", table=last.other, truth=last.other, train=True, **common))
    for by in shifts_of(last.table):
        wrong = replay_tables.shifted(last.table, by)
        tasks.append(Replayed(by, table=wrong, truth=last.table, **common))
    return tasks


def _add(row: ReplayRow, task: Replayed, used: Sequence[Used], groups: Sequence[Group]) -> None:
    """What all ranks found in one task."""
    group = next(g for g in groups if g.adapter == task.adapter)
    logprobs = next((u.logprobs for u in used if u.logprobs is not None), None)
    wrong = sum(u.wrong for u in used)
    seen = np.logical_or.reduce([u.seen for u in used])
    row.unseen += int((task.truth.valid & ~seen).sum())
    if task.name in SHIFTS:
        assert logprobs is not None
        audit = next((u.audit for u in used if u.audit), None)
        error = largest_scaled(logprobs, group.expected)
        row.caught[task.name] = (wrong, error, audit)
        return
    row.routes += sum(u.routes for u in used)
    row.micro_batches = max(row.micro_batches, *(u.micro_batches for u in used))
    row.wrong += wrong
    row.first += [f"{task.name}: {line}" for u in used for line in u.first]
    if task.name == "recorded":
        assert logprobs is not None
        _worst(row, "vLLM", scaled(logprobs, group.rollout))
        _worst(row, "float64", scaled(logprobs, group.expected))
    elif task.name == "other experts":
        assert logprobs is not None
        _worst(row, "other experts", scaled(logprobs, group.expected_other))


def _worst(row: ReplayRow, name: str, errors: np.ndarray) -> None:
    found = Distance.of(errors)
    row.errors[name] = found.or_worse(row.errors.get(name, found))


def with_recompute(layout: Layout) -> Layout:
    settings = {"trainer": {"recompute": "full"}}
    return Layout(f"{layout.name}+recompute", with_settings(layout.config, settings))
