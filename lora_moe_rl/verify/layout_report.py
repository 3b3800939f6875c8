"""What `verify layout` reports: errors of each layout, and what would explain them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lora_moe_rl.verify import report
from lora_moe_rl.verify.compare import LAYOUT_QUANTITIES, entries
from lora_moe_rl.verify.report import Check

SHOWN = 3  # tensors named of each entry of the table that is wrong
# A sum that is left out changes a gradient by about its own size.
ROUNDING = 1e-3


@dataclass
class Row:
    """One layout. `failure`: why a quantity was not reached. `quantities`: all that there are."""

    name: str
    ranks: int
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0
    failure: str | None = None
    quantities: tuple[str, ...] = LAYOUT_QUANTITIES

    @property
    def passed(self) -> bool:
        right = all(check.passed for check in self.checks)
        return self.failure is None and right and not self._not_reached()

    def _not_reached(self) -> list[str]:
        found = {check.quantity for check in self.checks if check.error is not None}
        return [quantity for quantity in self.quantities if quantity not in found]

    def faults(self) -> Iterator[str]:
        """The site, and the entry of the sharding table that would explain it."""
        if self.failure:
            yield self.failure.splitlines()[0]  # --json has the traceback behind it
        wrong = [c for c in self.checks if not c.passed and c.error is not None]
        for check in wrong:
            if not check.faults:
                yield f"{check.quantity}: off by {check.error:.2g}, more than {check.tolerance:.0e}"
            for entry, faults in entries(check.faults):
                more = f" (and {len(faults) - SHOWN} more)" if len(faults) > SHOWN else ""
                names = ", ".join(f"{fault.name} by {fault.error:.2g}" for fault in faults[:SHOWN])
                yield f"{check.quantity}: off are {names}{more}; {entry}: {faults[0].rule}"
        computed = [c for c in wrong if c.quantity not in ("adapter", "checkpoint")]
        if computed and all((c.error or 0) < ROUNDING for c in computed) and not self.failure:
            yield (
                f"errors below {ROUNDING:.0e} are more likely the rounding of {self.name} than a "
                "sum that is left out; --tolerance sets what is allowed"
            )
        missing = self._not_reached()
        if missing and not self.failure:
            yield f"{', '.join(missing)}: not reached"


@dataclass
class Report(report.Report):
    """`rows[0]` is one rank against Hugging Face."""

    model: str
    device: str
    dtype: str
    samples: int
    rows: list[Row]
    seconds: float

    def parts(self) -> Iterator[Any]:
        yield (
            f"{self.model}: {self.device}, {self.dtype}, {self.samples} samples, "
            f"{self.seconds:.0f} s; the largest error against one rank:"
        )
        table = report.table(["", "ranks", *LAYOUT_QUANTITIES, "seconds", ""], left=(0, -1))
        limits = {c.quantity: f"{c.tolerance:.0e}" for row in self.rows for c in row.checks}
        cells = (limits.get(quantity, "") for quantity in LAYOUT_QUANTITIES)
        table.add_row("tolerance", "", *cells, "", "", style="dim", end_section=True)
        for row in self.rows:
            checks = {check.quantity: check for check in row.checks}
            cells = (_cell(checks.get(quantity)) for quantity in LAYOUT_QUANTITIES)
            verdict = report.verdict(row.passed)
            table.add_row(row.name, str(row.ranks), *cells, f"{row.seconds:.1f}", verdict)
        yield table

    def figures(self) -> dict[str, Any]:
        head = {key: value for key, value in vars(self).items() if key != "rows"}
        rows = [_row_figures(row) for row in self.rows]
        return head | {"seconds": round(self.seconds, 1), "passed": self.passed, "rows": rows}


def _cell(check: Check | None) -> str:
    if check is None or check.error is None:
        return "-"
    text = "0" if check.error == 0 else f"{check.error:.1e}"
    return text if check.passed else f"[bold red]{text}[/]"


def _row_figures(row: Row) -> dict[str, Any]:
    checks = {check.quantity: _check_figures(check) for check in row.checks}
    found = {key: value for key, value in vars(row).items() if key != "quantities"}
    found |= {"passed": row.passed, "seconds": round(row.seconds, 1)}
    return found | {"checks": checks}


def _check_figures(check: Check) -> dict[str, Any]:
    return {
        "error": check.error,
        "tolerance": check.tolerance,
        "passed": check.passed,
        "faults": [
            {
                "name": fault.name,
                "error": fault.error,
                "entry": fault.entry,
                "summed_over": fault.axes,
                "cut_over": fault.split,
            }
            for fault in check.faults
        ],
    }
