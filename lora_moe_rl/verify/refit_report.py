"""What `verify refit` reports: logprobs after each refit, and slots that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from lora_moe_rl.verify import report

# Largest |difference of logprobs|, by device and dtype; only the first has been measured.
TOLERANCES = {
    ("cpu", "float32"): 5e-6,
    ("cuda", "float32"): 1e-4,
    ("cpu", "bfloat16"): 0.15,
    ("cuda", "bfloat16"): 0.15,
}
# A trainer of several ranks may differ from that of one, and from the engine, by so many
# tolerances: it has the rounding of its sums over ranks beside, and the engine its own.
RANKS = 2
# The adapter must change each sequence by so many times the tolerance. In bfloat16, where 100 times
# would be 15 nats, what tells a right adapter from a wrong one is what the slots hold.
EFFECT = {"float32": 100, "bfloat16": 4}
ROOM = {"float32": 10, "bfloat16": 1.5}  # what is asked of the inputs beyond that, for rounding
SHOWN = 4  # faults of a row
_ALLOWED = ("tolerance", "least_effect", "merged")  # of a row: what it is judged by


@dataclass
class Row:
    """One refit, or an engine's base, where there is neither trainer nor transport.

    trainer_error, merged_error: largest |difference of logprobs| to a trainer of one rank and to
    the merged weights; ranks_error: of the trainer's to those of one rank; direct_error: of the
    engine's to those of the trainer that sent the adapter; effect: to the engine's
    own base, of the sequence with the least. from_exact: of the engine, of one rank and of the
    trainer to a float64 forward, which is not judged; empty where memory was too small for it.
    `unlike`: tensors of a slot that are not as vLLM's own loader has them. None: not reached, which
    passes for what a row does not have alone. `merged`: the engine serves merged weights and has no
    slots."""

    engine: str
    trainer: str = ""
    transport: str = ""
    trainer_error: float | None = None
    ranks_error: float | None = None
    direct_error: float | None = None
    merged_error: float | None = None
    from_exact: dict[str, float] = field(default_factory=dict)
    effect: float | None = None
    unlike: list[dict[str, Any]] | None = None
    nbytes: int = 0
    publish_seconds: float = 0.0
    seconds: float = 0.0
    failure: str | None = None
    tolerance: float = TOLERANCES["cpu", "float32"]
    least_effect: float = EFFECT["float32"] * TOLERANCES["cpu", "float32"]
    merged: bool = False

    @property
    def name(self) -> str:
        return " ".join(name for name in (self.engine, self.trainer, self.transport) if name)

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.differences() and not self.missing()

    def missing(self) -> list[str]:
        """What should have been compared and was not."""
        found, wanted = [], [("those of the merged weights", self.merged_error)]
        if self.trainer:
            wanted = [("a one-rank trainer's", self.trainer_error), *wanted]
            wanted += [("the base's", self.effect)]
            if self.ranks_error is None:
                found.append("the trainer's logprobs were not compared with those of one rank")
            if self.direct_error is None:
                found.append("logprobs were not compared with those of the trainer that sent")
        found += [f"logprobs were not compared with {n}" for n, value in wanted if value is None]
        if self.trainer and not self.merged and self.unlike is None:
            found.append("what the slots hold was not compared")
        return found

    def differences(self) -> list[str]:
        """Figures beyond what is allowed. NaN is."""
        found = []
        theirs = (
            ("a one-rank trainer's", self.trainer_error),
            ("those of the merged weights", self.merged_error),
        )
        for whose, error in theirs:
            if error is not None and not error <= self.tolerance:
                found.append(f"logprobs differ from {whose} by {error:.2g}")
        if self.ranks_error is not None and not self.ranks_error <= RANKS * self.tolerance:
            found.append(f"the trainer's logprobs differ from one rank's by {self.ranks_error:.2g}")
        if self.direct_error is not None and not self.direct_error <= RANKS * self.tolerance:
            found.append(f"logprobs differ from the sending trainer's by {self.direct_error:.2g}")
        if self.effect is not None and not self.effect >= self.least_effect:
            found.append(f"logprobs differ from the base's by {self.effect:.2g} only")
        for unlike in self.unlike or ():
            experts = unlike["experts"]
            which = "" if experts is None else f", experts {', '.join(map(str, experts))} of it"
            found.append(
                f"{unlike['tensor']} is not in its slot on engine rank {unlike['worker']}{which} "
                f"(off by {unlike['error']:.2g} of its largest value)"
            )
        return found

    def faults(self) -> Iterator[str]:
        """What is wrong, and whether the refit is to blame."""
        if self.failure:
            yield self.failure.splitlines()[0]
        else:
            yield from self.missing()
        differences = self.differences()
        yield from report.first(differences, SHOWN)
        if differences and self.unlike == []:
            yield (
                "all slots hold what vLLM's own loader puts there: what differs is not the refit "
                "but what engine or trainer computes"
            )


@dataclass
class Report(report.Report):
    """`left_out`: why engines of the default are not among the rows."""

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
    left_out: list[str] = field(default_factory=list)
    width = 175

    def parts(self) -> Iterator[Any]:
        used, experts = self.experts
        yield (
            f"{self.model}, {self.expert_layout}: {self.device}, {self.dtype}, "
            f"{self.seconds:.0f} s\n{self.sequences} sequences of {self.tokens} tokens in all, "
            f"{used} of {experts} experts used; a last bit changed everywhere moves "
            f"Hugging Face's logprobs by {self.noise:.1e}"
        )
        yield from (Text(f"left out: {line}") for line in self.left_out)
        table = report.table(
            ["engine", "trainer", "transport", "one rank's", "trainer's", "direct", "merged",
             "base's", "engine to float64", "one rank to it", "trainer to it", "slots", "bytes",
             "publish s", "seconds", ""],
            left=(0, 1, 2, -1),
        )  # fmt: skip
        limit = f"{self.tolerance:.0e}"
        ranks = f"{RANKS * self.tolerance:.0e}"
        effect = f"≥ {EFFECT[self.dtype] * self.tolerance:.0e}"
        limits = [limit, ranks, ranks, limit, effect, "", "", "", "0"]
        table.add_row("tolerance", "", "", *limits, style="dim", end_section=True)
        for row in self.rows:
            table.add_row(*_cells(row))
        yield table

    def figures(self) -> dict[str, Any]:
        """All that the table says and every slot that is wrong."""
        rows = [
            {key: value for key, value in vars(row).items() if key not in _ALLOWED}
            | {"passed": row.passed, "faults": row.differences()}
            for row in self.rows
        ]
        return vars(self) | {"passed": self.passed, "rows": rows}


def _cells(row: Row) -> list[str]:
    errors = (
        row.trainer_error, row.ranks_error, row.direct_error, row.merged_error, row.effect,
    )  # fmt: skip
    exact = map(row.from_exact.get, ("engine", "one rank", "trainer"))
    slots = "-" if row.unlike is None else str(len(row.unlike))
    refit = (f"{row.nbytes:,}", f"{row.publish_seconds:.3f}") if row.nbytes else ("-", "-")
    place = (row.engine, row.trainer or "(base)", row.transport or "-")
    end = (f"{row.seconds:.1f}", report.verdict(row.passed))
    return [*place, *map(report.number, (*errors, *exact)), slots, *refit, *end]
