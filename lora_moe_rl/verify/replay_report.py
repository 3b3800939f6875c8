"""What `verify replay` reports: what vLLM recorded, and what Megatron replayed in each layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.text import Text

from lora_moe_rl.verify import report
from lora_moe_rl.verify.comparisons import ROUNDING, Distance
from lora_moe_rl.verify.replay_record import Recording
from lora_moe_rl.verify.replay_tables import SHIFTS
from lora_moe_rl.verify.report import verdict

TOLERANCE = 1e-5  # of the worst token's logprob
MOST = 0.1  # of the tolerance: for nine tokens of ten
FAULT = 10  # times what is allowed of the worst token is the least that a wrong table must move
COMPARED: tuple[str, ...] = ("vLLM", "float64", "other experts")  # with whose logprobs
NAMED = {
    "vLLM": "vLLM's",
    "float64": "Hugging Face's in float64",
    "other experts": "Hugging Face's in float64 with the other experts",
}
SHOWN = 3
RECORDS = "routes beside Hugging Face's own; logprobs beside its float64 with the same experts:"
REPLAYS = "routes used; errors of logprobs; wrong routes noticed in tables shifted by one ...:"


def allowed(tolerance: float, rounding: Distance | None) -> Distance:
    """The largest distance of logprobs that is allowed. `rounding`: how far Hugging Face's own
    float32 is from float64 on the same tokens, if known."""
    least = Distance(tolerance, MOST * tolerance)
    if rounding is None:
        return least
    return least.or_worse(Distance(ROUNDING * rounding.worst, ROUNDING * rounding.most))


@dataclass
class RecordRow:
    """One condition. `error`: of vLLM's logprobs against Hugging Face's in float64; `rounding`:
    errors of Hugging Face's own float32 on the same tokens, `[sampled tokens]`, if known."""

    recording: Recording
    routes: int = 0
    differences: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    error: Distance | None = None
    rounding: np.ndarray | None = None
    allowed: Distance = field(default_factory=lambda: allowed(TOLERANCE, None))

    @property
    def name(self) -> str:
        return self.recording.name

    @property
    def passed(self) -> bool:
        r = self.recording
        if r.absent:
            return True
        within = self.error is not None and self.error.within(self.allowed)
        whole = r.table is not None and r.table.coverage == 1 and self.routes > 0
        return r.failure is None and not self.differences and within and whole

    def faults(self) -> Iterator[str]:
        if self.recording.failure:
            yield self.recording.failure
        if (table := self.recording.table) is not None and table.coverage < 1:
            yield f"{1 - table.coverage:.1%} of the routes were not recorded"
        yield from self.differences[:SHOWN]
        if self.error is not None and not self.error.within(self.allowed):
            yield f"vLLM's logprobs are off by {self.error}, more than {self.allowed}"

    def cells(self) -> list[str]:
        r = self.recording
        if r.table is None:
            return [r.name, *"-------", f"absent: {r.absent}"]
        return [
            r.name, f"{self.routes:,}", f"{r.table.coverage:.1%}", str(len(self.differences)),
            str(len(self.ties)), _cell(self.error), str(self.allowed), f"{r.seconds:.1f}",
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
            "logprob_error": _figures(self.error),
            "allowed": _figures(self.allowed),
            "seconds": round(r.seconds, 1),
        }


@dataclass
class ReplayRow:
    """One layout.

    routes: that were used; `wrong` of them were not the table's, the `first` ones in words. unseen:
    (token, layer) that no dispatcher was given. errors: of logprobs, by what they are compared
    with: vLLM's, float64's with the same routes, and float64's with the other experts; `allowed`
    likewise. caught:
    (wrong routes in the dispatchers' maps, error of logprobs, what a run's own audit says) by kind
    of shift, of the `shifts` that this model can have.
    """

    name: str
    ranks: int
    micro_batches: int = 0
    routes: int = 0
    wrong: int = 0
    first: list[str] = field(default_factory=list)
    unseen: int = 0
    errors: dict[str, Distance] = field(default_factory=dict)
    caught: dict[str, tuple[int, float, str | None]] = field(default_factory=dict)
    shifts: Sequence[str] = SHIFTS
    seconds: float = 0.0
    failure: str | None = None
    allowed: Mapping[str, Distance] = field(
        default_factory=lambda: dict.fromkeys(COMPARED, allowed(TOLERANCE, None))
    )

    @property
    def least_moved(self) -> float:
        """How far a wrong table has to move the worst token's logprob, at the least."""
        return FAULT * self.allowed["float64"].worst

    @property
    def passed(self) -> bool:
        within = all(error.within(self.allowed[name]) for name, error in self.errors.items())
        all_caught = all(
            wrong > 0 and error > self.least_moved and audit
            for wrong, error, audit in self.caught.values()
        )
        complete = self.routes > 0 and not self.unseen
        complete &= set(self.caught) == set(self.shifts) and set(self.errors) == set(COMPARED)
        return self.failure is None and not self.wrong and within and all_caught and complete

    def faults(self) -> Iterator[str]:
        if self.failure:
            yield self.failure.splitlines()[0]
            return
        yield from self.first[:SHOWN]
        if self.unseen:
            yield f"{self.unseen} tokens of a layer passed no dispatcher"
        for name, error in self.errors.items():
            most = self.allowed[name]
            if not error.within(most):
                yield f"logprobs are off from {NAMED[name]} by {error}, more than {most}"
        for by, (wrong, error, audit) in self.caught.items():
            if not wrong:
                yield f"a table that is wrong by one {by} was not noticed in the routes used"
            if not audit:
                yield f"the audit of a run did not notice a table that is wrong by one {by}"
            if not error > self.least_moved:
                yield (
                    f"a table that is wrong by one {by} moved no logprob by more than {error:.2g}: "
                    f"at least {self.least_moved:.0e} is asked"
                )

    def cells(self) -> list[str]:
        caught = [f"{self.caught[by][0]:,}" if by in self.caught else "-" for by in SHIFTS]
        errors = [_cell(self.errors.get(name)) for name in COMPARED]
        return [
            self.name, str(self.ranks), str(self.micro_batches), f"{self.routes:,}",
            f"{self.wrong:,}", *errors, *caught, f"{self.seconds:.1f}", verdict(self.passed),
        ]  # fmt: skip

    def figures(self) -> dict[str, Any]:
        found = dict(vars(self))
        caught = {
            by: {"wrong_routes": wrong, "logprob_error": error, "audit": audit}
            for by, (wrong, error, audit) in self.caught.items()
        }
        found["first_wrong"] = found.pop("first")
        del found["errors"]
        return found | {
            "passed": self.passed,
            "caught": caught,
            "logprob_errors": {name: _figures(error) for name, error in self.errors.items()},
            "allowed": {name: _figures(one) for name, one in self.allowed.items()},
            "seconds": round(self.seconds, 1),
        }


@dataclass
class Report(report.Report):
    model: str
    records: list[RecordRow]
    rounding: Distance | None  # of Hugging Face's own float32; None without a float64 forward
    allowed: Mapping[str, Distance]  # of replays
    moved: float  # share of the other experts' routes that the record has not
    replays: list[ReplayRow]
    seconds: float
    width = 160

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
        yield f"{self.model}: cpu, float32, {self.seconds:.0f} s\n{self.measured()}"
        names = (
            "vLLM records",
            "routes",
            "valid",
            "differ",
            "ties",
            "logprobs",
            "allowed",
            "seconds",
            "",
        )
        records = report.table(names, RECORDS, left=(0, -1), no_wrap=True)
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

    def measured(self) -> str:
        """What errors of logprobs are beside."""
        bounds = ", ".join(f"{name} {one}" for name, one in self.allowed.items())
        least = f"of the worst token / within which nine of ten are; allowed of replays: {bounds}"
        if self.rounding is None:
            return (
                f"errors of logprobs: {least}; memory is too small for a float64 forward: "
                "`float64` is Hugging Face's float32"
            )
        return f"errors of logprobs: {least}\nHugging Face's own float32: {self.rounding}"

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
            "rounding": _figures(self.rounding),
            "records": [row.figures() for row in self.records],
            "replays": [row.figures() for row in self.replays],
        }


def _cell(error: Distance | None) -> str:
    return "-" if error is None else str(error)


def _figures(error: Distance | None) -> dict[str, float] | None:
    return None if error is None else vars(error)
