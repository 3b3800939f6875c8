"""What became of each fault, and what was found at the end, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_moe_rl.chaos.checks import Check
from lora_moe_rl.chaos.kinds import KINDS
from lora_moe_rl.chaos.plan import Fault


@dataclass(frozen=True)
class Row:
    """What became of a fault. `seconds`: from it to the next good step; None: there was none."""

    fault: Fault
    who: str
    happened: bool
    outcome: str
    seconds: float | None

    @property
    def promised(self) -> str:
        return " or ".join(sorted(KINDS[self.fault.kind].promised))

    @property
    def as_promised(self) -> bool:
        kept = self.outcome in KINDS[self.fault.kind].promised
        return self.happened and kept and self.seconds is not None


def passed(rows: Sequence[Row], found: Sequence[Check]) -> bool:
    return all(row.as_promised for row in rows) and all(one.passed for one in found)


def table(rows: Sequence[Row], found: Sequence[Check]) -> str:
    lines = [("step", "fault", "happened", "outcome", "promised", "next good step", "")]
    lines += [
        (
            str(row.fault.step),
            row.fault.kind,
            "yes" if row.happened else "no",
            row.outcome,
            row.promised,
            _seconds(row),
            "ok" if row.as_promised else "FAIL",
        )
        for row in rows
    ]
    rest = [(one.name, "ok" if one.passed else "FAIL", one.found) for one in found]
    return "\n".join(["", *_aligned(lines), "", *_aligned(rest)])


def line(row: Row) -> str:
    """A fault as it is said once it is over."""
    kept = "ok" if row.as_promised else "FAIL"
    what = f"step {row.fault.step}: {row.fault.kind} ({row.who or 'nobody'})"
    return f"{what}: {row.outcome}, next good step {_seconds(row)}: {kept}"


def as_json(row: Row) -> dict[str, Any]:
    found = {"who": row.who, "happened": row.happened, "outcome": row.outcome}
    judged = {"seconds": row.seconds, "promised": row.promised, "as_promised": row.as_promised}
    return vars(row.fault) | found | judged


def _seconds(row: Row) -> str:
    return "-" if row.seconds is None else f"{row.seconds:.1f} s"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[c.ljust(w) for c, w in zip(one, widths, strict=True)] for one in lines]
    return ["  ".join(one).rstrip() for one in padded]
