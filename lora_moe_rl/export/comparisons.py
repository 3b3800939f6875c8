"""Errors against what is allowed, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """`error` must be at most `limit`; with `at_least`, at least. NaN passes nothing."""

    name: str
    error: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.error >= self.limit if self.at_least else self.error <= self.limit


def largest(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest |difference|; NaN when there is one."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)]))


def as_json(rows: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "passed": all(row.passed for row in rows),
        "rows": [
            {
                "name": row.name,
                "error": row.error if math.isfinite(row.error) else None,
                "limit": row.limit,
                "at_least": row.at_least,
                "passed": row.passed,
            }
            for row in rows
        ],
    }


def show(rows: Sequence[Comparison]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "largest |Δlogprob|", "allowed", ""):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        verdict = "[green]PASS[/]" if row.passed else "[bold red]FAIL[/]"
        sign = "≥" if row.at_least else "≤"
        table.add_row(row.name, f"{row.error:.1e}", f"{sign} {row.limit:.0e}", verdict)
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, 100))
    console.print(table)
    console.print("PASS" if all(row.passed for row in rows) else "FAIL", style="bold")
