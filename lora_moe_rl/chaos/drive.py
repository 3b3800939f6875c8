"""A run from its start to its end, with the faults of a plan, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lora_moe_rl.chaos.child import Child
from lora_moe_rl.chaos.inject import Injected, Scene, inject
from lora_moe_rl.chaos.judge import NEVER, Judge, Sight
from lora_moe_rl.chaos.kinds import KINDS, STOPPED, patience
from lora_moe_rl.chaos.plan import Fault
from lora_moe_rl.chaos.report import Row, line
from lora_moe_rl.config import RunConfig
from lora_moe_rl.telemetry import names
from lora_moe_rl.telemetry.metrics import read_steps

POLL_S = 0.25
NOTE_S = 2.0  # how often the run's processes are noted
TARGET_S = 60.0  # longest wait for somebody who can have a fault


class Drive:
    """`start(resume)` starts the run's process; `config` is its; `say` gets a line a fault."""

    def __init__(
        self,
        start: Callable[[bool], Child],
        config: RunConfig,
        asked: Path,
        say: Callable[[str], None],
    ):
        self.start, self.config, self.asked, self.say = start, config, asked, say
        self.run_dir = config.run_dir
        self.children: list[Child] = []
        self.left: list[str] = []  # processes that outlived what started them
        self._noted = 0.0
        self._read: tuple[Any, list[dict[str, Any]]] = None, []

    @property
    def child(self) -> Child:
        """The newest; another after each stop."""
        return self.children[-1]

    def run(self, faults: Sequence[Fault]) -> tuple[list[Row], int | None]:
        """What became of each fault; and the exit code in the end, None when the run was ended
        because it was stuck. The run's processes are ended with this, whatever happens."""
        rows: list[Row] = []
        try:
            self.children.append(self.start(False))
            for fault in faults:
                rows.append(self._fault(fault))
                self.say(line(rows[-1]))
            self._until(lambda: None)
            code = self.child.poll()
            if code is not None:
                self.left += self.child.leftovers()
            return rows, code
        finally:
            for child in self.children:
                child.end()

    def _fault(self, fault: Fault) -> Row:
        if not self._until(lambda: self._newest() >= fault.step - 1):
            return Row(fault, "", False, NEVER, None)
        time.sleep(fault.phase * self._step_seconds())
        since, before = self.child.said_bytes, self._sight()
        injected = self._until(lambda: inject(self._scene, fault), TARGET_S)
        if injected is None:
            return Row(fault, "", False, NEVER, None)
        judge = Judge(fault.kind, before, patience(fault.kind, self.config))
        try:
            outcome = self._outcome(judge, injected, since)
        finally:
            injected.lift()
        if outcome == STOPPED:
            self.left += self.child.leftovers()
            self.children.append(self.start(True))
            self._until(lambda: judge.goes_on(self._sight()), judge.patience_s)
        return Row(fault, injected.who, judge.happened, outcome, judge.seconds)

    def _outcome(self, judge: Judge, injected: Injected, since: int) -> str:
        while True:
            if not judge.happened and injected.happened():
                judge.has_happened(time.monotonic())
            if outcome := judge.look(self._sight(since)):
                return outcome
            self._pause()

    @property
    def _scene(self) -> Scene:
        return Scene(self.child, self.run_dir, self.asked)

    def _sight(self, since: int | None = None) -> Sight:
        """With what was said from byte `since` on. The exit code first: what a process has said and
        written is complete then."""
        code = self.child.poll()
        said = "" if since is None else self.child.said(since)
        return Sight(time.monotonic(), said, self._records(), code)

    def _records(self) -> list[dict[str, Any]]:
        file = self.run_dir / "metrics.jsonl"
        if not file.exists():
            return []
        found = file.stat()
        mark = found.st_ino, found.st_size, found.st_mtime_ns
        if self._read[0] != mark:
            self._read = mark, read_steps(file)
        return self._read[1]

    def _newest(self) -> int:
        records = self._records()
        return records[-1]["step"] if records else 0

    def _step_seconds(self) -> float:
        """How long a usual step of the run takes."""
        return median([record[names.STEP_SECONDS] for record in self._records()] or [0.0])

    def _until(self, condition: Callable[[], Any], limit_s: float | None = None) -> Any:
        """What `condition` gives once it is true; None when the run ends before that, after
        `limit_s`, or when no step is done for as long as the slowest fault may take."""
        limit_s = limit_s or max(patience(kind, self.config) for kind in KINDS)
        newest, deadline = self._newest(), time.monotonic() + limit_s
        while not (found := condition()):
            if self.child.poll() is not None or time.monotonic() > deadline:
                return None
            if self._newest() != newest:
                newest, deadline = self._newest(), time.monotonic() + limit_s
            self._pause()
        return found

    def _pause(self) -> None:
        if time.monotonic() - self._noted > NOTE_S:
            self.child.tree()
            self._noted = time.monotonic()
        time.sleep(POLL_S)
