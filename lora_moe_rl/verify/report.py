"""What a command that checks something reports: in words, as a table and as one JSON object.

Check     one figure against what is allowed
Row       what was checked under one name, and what is wrong with it
Report    rows; a command shows it, or prints it as JSON, and ends with its verdict
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lora_moe_rl.errors import LoraMoeRlError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

Say = Callable[[str], None]
WIDTH = 110


@dataclass(frozen=True)
class Check:
    """One figure: `error` must be at most `tolerance`, or with `at_least` not below it. It is None
    where it was not reached. `faults` are its parts that are wrong."""

    quantity: str
    error: float | None
    tolerance: float
    faults: Sequence[Any] = field(default_factory=tuple)
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """NaN passes nothing."""
        if self.error is None:
            return False
        return self.error >= self.tolerance if self.at_least else self.error <= self.tolerance


class Row(Protocol):
    """`name` says what was checked, and `faults` what is wrong with it, a sentence each."""

    @property
    def name(self) -> str: ...
    @property
    def passed(self) -> bool: ...
    def faults(self) -> Iterable[str]: ...


class Report:
    """What all reports have in common. One has `rows`, says in `parts` what is shown above the
    faults (strings, rich's texts and tables) and in `figures` what the JSON object holds."""

    rows: Any  # a sequence of Row
    width = WIDTH

    @property
    def passed(self) -> bool:
        """Nothing looked at is nothing shown."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def parts(self) -> Iterable[RenderableType]:
        raise NotImplementedError

    def figures(self) -> Any:
        raise NotImplementedError

    def explanations(self) -> list[str]:
        """What is wrong, and where."""
        return [f"{row.name}: {line}" for row in self.rows for line in row.faults()]

    def as_json(self) -> Any:
        """All that the tables say, and every fault. A number that is not finite is null."""
        return finite(self.figures())

    def show(self) -> None:
        from rich.text import Text

        out = console(self.width)
        for part in self.parts():
            out.print(Text(part) if isinstance(part, str) else part)
        for line in self.explanations():
            out.print(Text(line, style="red"))
        out.print(Text("PASS" if self.passed else "FAIL", style="bold"))

    def conclude(self, as_json: bool) -> int:
        """Prints the report; returns the exit code, 1 when anything is wrong."""
        if as_json:
            print(json.dumps(self.as_json(), indent=1))
        else:
            self.show()
        return 0 if self.passed else 1


def finite(value: Any) -> Any:
    """The same for JSON: each number in it that is not finite is None."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console(width: int = WIDTH) -> Console:
    """At least so wide: cut off by a narrow terminal, the figures would be worth nothing."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, width=max(Console().width, width))


def table(
    columns: Sequence[str], title: str = "", left: Sequence[int] = (0,), no_wrap: bool = False
) -> Table:
    """A table without rows; columns are on the right, but for those numbered in `left`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
        title=title or None, title_justify="left", title_style="bold",
    )  # fmt: skip
    places = [place % len(columns) for place in left]
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place in places else "right", no_wrap=no_wrap)
    return made


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def verdict(passed: bool) -> str:
    return "[green]PASS[/]" if passed else "[bold red]FAIL[/]"


def first(lines: Sequence[str], most: int) -> Iterator[str]:
    """Not more than `most` of the lines, and how many are left out."""
    yield from lines[:most]
    if len(lines) > most:
        yield f"and {len(lines) - most} more"


@contextlib.contextmanager
def timed(row: Any, fatal: type[LoraMoeRlError] | tuple[()] = ()) -> Iterator[None]:
    """Notes the row's seconds. An error of ours becomes its failure, so that the next row follows,
    unless it is a `fatal` one."""
    started = time.perf_counter()
    try:
        yield
    except fatal:
        raise
    except LoraMoeRlError as error:
        row.failure = str(error)
    finally:
        row.seconds = time.perf_counter() - started


@contextlib.contextmanager
def progress(phases: int, quiet: bool) -> Iterator[Say]:
    """A bar on a terminal that is told of each phase as it begins; on stderr, so that --json stays
    clean."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=quiet
    ) as progress:
        task = progress.add_task("starting", total=phases, completed=-1)

        def say(text: str) -> None:
            progress.update(task, description=text)
            progress.advance(task)

        yield say
