"""Logprobs of several forms of one adapter against those of the trained one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_moe_rl.verify import report
from lora_moe_rl.verify.report import Check

MOST = 0.9  # of tokens
ROUNDING = 3  # times what Hugging Face's own float32 is off by is allowed where that is more


def largest(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest |difference|; NaN when either has one. Raises ValueError for other lengths."""
    for a, b in zip(ours, theirs, strict=True):
        if len(a) != len(b):
            raise ValueError(f"{len(a)} logprobs against {len(b)}")
    pairs = zip(ours, theirs, strict=True)
    return float(np.max([np.abs(a.astype(np.float64) - b).max() for a, b in pairs]))


def scaled(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """|difference| / max(1, |logprob|) of every token, of one sample after the other; `expected`
    may hold only the last ones of a sample. Raises ValueError where it holds more."""
    for a, b in zip(got, expected, strict=True):
        if len(a) < len(b):
            raise ValueError(f"{len(a)} logprobs against {len(b)}")
    pairs = zip(last(got, expected), expected, strict=True)
    return np.concatenate([np.abs(a - b) / np.maximum(1.0, np.abs(b)) for a, b in pairs])


def last(of: Sequence[np.ndarray], like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The last ones of each sample, as many as `like` has of it."""
    return [a[len(a) - len(b) :] for a, b in zip(of, like, strict=True)]


def largest_scaled(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The worst token's error, as `scaled`. NaN where there is one."""
    return float(np.max(scaled(got, expected)))


@dataclass(frozen=True)
class Distance:
    """How far many tokens' logprobs are off: the largest error, as `scaled`, and that which nine of
    ten keep within. The largest is one sensitive token's, and so is most of a mean square."""

    worst: float
    most: float

    @classmethod
    def of(cls, *errors: np.ndarray) -> Distance:
        """NaN where there is one."""
        every = np.concatenate(errors).astype(np.float64)
        return cls(float(np.max(every)), float(np.quantile(every, MOST)))

    def within(self, allowed: Distance) -> bool:
        return self.worst <= allowed.worst and self.most <= allowed.most

    def or_worse(self, other: Distance) -> Distance:
        """The larger of each; NaN stays."""
        worst, most = np.maximum((self.worst, self.most), (other.worst, other.most))
        return Distance(float(worst), float(most))

    def __str__(self) -> str:
        return f"{self.worst:.1e} / {self.most:.0e}"


def left_of(
    got: Sequence[np.ndarray], merged: Sequence[np.ndarray], base: Sequence[np.ndarray]
) -> float:
    """How much of what an adapter changes is not there: ||got - merged|| / ||base - merged||, 1 for
    a `got` without it. NaN where one has NaN or the adapter changes nothing. Raises ValueError for
    other lengths."""
    ours, theirs, without = (np.concatenate(one).astype(np.float64) for one in (got, merged, base))
    if not ours.shape == theirs.shape == without.shape:
        raise ValueError(f"{len(ours)} logprobs against {len(theirs)} and {len(without)}")
    effect = np.linalg.norm(without - theirs)
    return float(np.linalg.norm(ours - theirs) / effect) if effect else math.nan


def random_prompts(vocab_size: int) -> list[list[int]]:
    """Random tokens, the same each time: a few and many."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length).tolist() for length in (5, 24, 60, 120)]


@dataclass
class Comparisons(report.Report):
    """`head` goes before the rows in the JSON object; `measured` is above the figures. `left_out`:
    why something is not among the rows that others have there."""

    head: dict[str, Any]
    rows: list[Check]
    measured: str = "largest |Δlogprob|"
    left_out: Sequence[str] = ()

    def explanations(self) -> list[str]:
        return []  # a row of the table says it all

    def parts(self) -> Iterator[Any]:
        yield from (f"left out: {line}" for line in self.left_out)
        table = report.table(["", self.measured, "allowed", ""], left=(0, -1))
        for row in self.rows:
            allowed = f"{'≥' if row.at_least else '≤'} {row.tolerance:.0e}"
            verdict = report.verdict(row.passed)
            table.add_row(row.quantity, report.number(row.error), allowed, verdict)
        yield table

    def figures(self) -> dict[str, Any]:
        rows = [
            {
                "name": row.quantity,
                "error": row.error,
                "limit": row.tolerance,
                "at_least": row.at_least,
                "passed": row.passed,
            }
            for row in self.rows
        ]
        left_out = {"left_out": [*self.left_out]} if self.left_out else {}
        return self.head | left_out | {"passed": self.passed, "rows": rows}
