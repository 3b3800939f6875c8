"""What `verify replay` reports: what vLLM recorded, and what Megatron replayed in each layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from lora_moe_rl.verify import report
from lora_moe_rl.verify.replay_record import Recording
from lora_moe_rl.verify.replay_tables import SHIFTS
from lora_moe_rl.verify.report import number, verdict

TOLERANCE = 1e-5
# Of the tiny INT4 model as plain numbers they are off by as much: 1.9e-5 on two ranks.
QUANTISED_TOLERANCE = 3e-5
COMPARED = ("vLLM", "Hugging Face", "other experts")  # with whose logprobs
SHOWN = 3
REPLAYS = "routes used; errors of logprobs; wrong routes noticed in tables shifted by one ...:"


@dataclass
class RecordRow:
    """One condition. `error`: of vLLM's logprobs against Hugging Face's."""

    recording: Recording
    routes: int = 0
    differences: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    error: float | None = None
    tolerance: float = TOLERANCE

    @property
    def name(self) -> str:
        return self.recording.name

    @property
    def passed(self) -> bool:
        r = self.recording
        if r.absent:
            return True
        within = self.error is not None and self.error <= self.tolerance
        whole = r.table is not None and r.table.coverage == 1 and self.routes > 0
        return r.failure is None and not self.differences and within and whole

    def faults(self) -> Iterator[str]:
        if self.recording.failure:
            yield self.recording.failure
        if (table := self.recording.table) is not None and table.coverage < 1:
            yield f"{1 - table.coverage:.1%} of the routes were not recorded"
        yield from self.differences[:SHOWN]
        if self.error is not None and not self.error <= self.tolerance:
            yield f"vLLM's logprobs are off by {self.error:.2g}, more than {self.tolerance:.0e}"

    def cells(self) -> list[str]:
        r = self.recording
        if r.table is None:
            return [r.name, "-", "-", "-", "-", "-", "-", f"absent: {r.absent}"]
        return [
            r.name, f"{self.routes:,}", f"{r.table.coverage:.1%}", str(len(self.differences)),
            str(len(self.ties)), number(self.error), f"{r.seconds:.1f}",
            f"{verdict(self.passed)} {r.proof}",
        ]  # fmt: skip

    def figures(self) -> dict[str, Any]:
        r = self.recording
        return {
            "name": r.name,
            "passed": self.passed,
            "absent": r.absent,
            "failure": r.failure,
            "proof": r.proof,
            "adapter": r.adapter,
            "samples": len(r.sequences),
            "routes": self.routes,
            "coverage": None if r.table is None else r.table.coverage,
            "differences": self.differences,
            "ties": self.ties,
            "logprob_error": self.error,
            "seconds": round(r.seconds, 1),
        }


@dataclass
class ReplayRow:
    """One layout.

    routes: that were used; `wrong` of them were not the table's, the `first` ones in words. unseen:
    (token, layer) that no dispatcher was given. errors: of logprobs, by what they are compared
    with. caught: (wrong routes in the dispatchers' maps, error of logprobs, what a run's own audit
    says) by kind of shift.
    """

    name: str
    ranks: int
    micro_batches: int = 0
    routes: int = 0
    wrong: int = 0
    first: list[str] = field(default_factory=list)
    unseen: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    caught: dict[str, tuple[int, float, str | None]] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str | None = None
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        within = all(error <= self.tolerance for error in self.errors.values())
        all_caught = all(
            wrong > 0 and error > self.tolerance and audit
            for wrong, error, audit in self.caught.values()
        )
        complete = self.routes > 0 and not self.unseen
        complete &= set(self.caught) == set(SHIFTS) and set(self.errors) == set(COMPARED)
        return self.failure is None and not self.wrong and within and all_caught and complete

    def faults(self) -> Iterator[str]:
        if self.failure:
            yield self.failure.splitlines()[0]
            return
        yield from self.first[:SHOWN]
        if self.unseen:
            yield f"{self.unseen} tokens of a layer passed no dispatcher"
        limit = f"{self.tolerance:.0e}"
        for name, error in self.errors.items():
            if not error <= self.tolerance:
                yield f"logprobs are off from {name}'s by {error:.2g}, more than {limit}"
        for by, (wrong, error, audit) in self.caught.items():
            if not wrong:
                yield f"a table that is wrong by a {by} was not noticed in the routes used"
            if not audit:
                yield f"the audit of a run did not notice a table that is wrong by a {by}"
            if not error > self.tolerance:
                yield f"a table that is wrong by a {by} moved no logprob by more than {error:.2g}"

    def cells(self) -> list[str]:
        caught = [f"{self.caught[by][0]:,}" if by in self.caught else "-" for by in SHIFTS]
        errors = [number(self.errors.get(name)) for name in COMPARED]
        return [
            self.name, str(self.ranks), str(self.micro_batches), f"{self.routes:,}",
            f"{self.wrong:,}", *errors, *caught, f"{self.seconds:.1f}", verdict(self.passed),
        ]  # fmt: skip

    def figures(self) -> dict[str, Any]:
        found = {key: value for key, value in vars(self).items() if key != "tolerance"}
        caught = {
            by: {"wrong_routes": wrong, "logprob_error": error, "audit": audit}
            for by, (wrong, error, audit) in self.caught.items()
        }
        names = {"first": "first_wrong", "errors": "logprob_errors"}
        return {names.get(key, key): value for key, value in found.items()} | {
            "passed": self.passed,
            "caught": caught,
            "seconds": round(self.seconds, 1),
        }


@dataclass
class Report(report.Report):
    model: str
    records: list[RecordRow]
    moved: float  # share of the other experts' routes that the record has not
    replays: list[ReplayRow]
    seconds: float
    width = 142

    @property
    def rows(self) -> list[RecordRow | ReplayRow]:
        return [*self.records, *self.replays]

    @property
    def passed(self) -> bool:
        """Other experts that are the recorded ones would show nothing."""
        return super().passed and self.moved > 0

    def explanations(self) -> list[str]:
        same = "no route of the other experts differs from the record: they show nothing"
        return super().explanations() + ([] if self.moved > 0 else [same])

    def parts(self) -> Iterator[Any]:
        yield f"{self.model}: cpu, float32, {self.seconds:.0f} s"
        names = ("vLLM records", "routes", "valid", "differ", "ties", "logprobs", "seconds", "")
        title = "beside Hugging Face's own routes and logprobs:"
        records = report.table(names, title, left=(0, -1), no_wrap=True)
        for record in self.records:
            records.add_row(*record.cells())
        yield records
        shifts = [f"by {by}" for by in SHIFTS]
        names = ("Megatron", "ranks", "batches", "used", "wrong", *COMPARED, *shifts, "seconds", "")
        replays = report.table(names, REPLAYS, left=(0, -1), no_wrap=True)
        for replay in self.replays:
            replays.add_row(*replay.cells())
        yield replays
        yield f"routes of the other experts that the record has not: {self.moved:.0%}"
        yield from (Text(line, style="yellow") for line in self.notes())

    def notes(self) -> list[str]:
        """Ties: they pass, and are said."""
        return [
            f"{row.name}: a tie within rounding: {line}"
            for row in self.records
            for line in row.ties
        ]

    def figures(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "other_experts_moved": self.moved,
            "records": [row.figures() for row in self.records],
            "replays": [row.figures() for row in self.replays],
        }
