"""What a run says on the terminal: one line a step, a progress bar, and who started.

Progress is shown on a terminal only; everything else goes to pipes and files as well.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lora_moe_rl.cluster.log import FORMAT
from lora_moe_rl.config import RunConfig
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry import names

HEADER_EVERY = 20
Bar = Callable[[int], None]

# Metric -> heading, width, format.
_COLUMNS = {
    "step": ("step", 5, "d"),
    names.REWARD: ("reward", 8, ".3f"),
    names.LOSS: ("loss", 10, "+.2e"),
    names.MISMATCH_KL: ("mismatch", 10, ".1e"),
    names.time("rollout"): ("rollout s", 11, ".2f"),
    names.time("train"): ("train s", 9, ".2f"),
    names.time("refit"): ("refit s", 9, ".3f"),
    names.STEP_SECONDS: ("step s", 8, ".2f"),
    names.TOKENS_PER_SECOND: ("tokens/s", 10, ",.0f"),
}

_console = Console(highlight=False, soft_wrap=True)
_errors = Console(highlight=False, soft_wrap=True, stderr=True)
_lines = 0


def step_line(record: dict[str, Any]) -> None:
    """Prints a step's metrics as one aligned line, under a header every twenty lines."""
    global _lines
    if _lines % HEADER_EVERY == 0:
        _console.print(Text(header(), style="bold"))
    _lines += 1
    _console.print(Text(format_step(record)))


def header() -> str:
    return "".join(heading.rjust(width) for heading, width, _ in _COLUMNS.values())


def format_step(record: dict[str, Any]) -> str:
    """A number that the step has none of (no rewards: the mean is NaN) reads `-`."""
    return "".join(
        _number(record.get(metric), form).rjust(width)
        for metric, (_, width, form) in _COLUMNS.items()
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


@contextmanager
def progress(total: int, config: RunConfig) -> Iterator[Bar]:
    """A bar for the rollout; yields what takes the number of samples that came in."""
    bar = Progress(
        TextColumn("rollout"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=_console,
        transient=True,
        disable=not (config.logging.progress and _console.is_terminal),
    )
    with bar:
        task = bar.add_task("rollout", total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def starting() -> Iterator[None]:
    """Shown while the actors start, which takes the better part of a minute."""
    if not _console.is_terminal:
        yield
        return
    with _console.status("starting trainer ranks and rollout engines"):
        yield


def say(message: str, style: str = "") -> None:
    _console.print(Text(message, style=style))


def warn(message: str) -> None:
    """On stderr, as what goes to stdout may be read by a program."""
    _errors.print(Text("warning: ", style="yellow"), Text(message), sep="")


def say_started(trainer: list[dict[str, Any]], engines: list[dict[str, Any]]) -> None:
    """`trainer` and `engines` are what each actor told of itself."""
    for kind, actors in (("trainer", trainer), ("engine", engines)):
        for index, facts in enumerate(actors):
            say(f"{kind}-{index}: {_facts(facts)}", "dim")


def _facts(facts: dict[str, Any]) -> str:
    parts = []
    for key, value in facts.items():
        if isinstance(value, dict):
            value = f"({_facts(value)})"
        elif isinstance(value, float):
            value = f"{value:.1f}"
        elif isinstance(value, int):
            value = f"{value:,}"
        parts.append(f"{key} {value}")
    return ", ".join(parts)


def say_resume(found: Found) -> None:
    for path, reason in found.skipped:
        say(f"skipped {path}: {reason}", "yellow")
    if found.path is None:
        say("no checkpoint yet: starting from step 1", "yellow")
    else:
        say(f"going on from {found.path}")


def say_done(step: int, steps: int) -> None:
    say(
        f"nothing is left to do: the checkpoint is at step {step}, and trainer.steps={steps}; "
        "raise it to go on"
    )


def say_notes(notes: list[str]) -> None:
    """Prints what a run did to the adapter that it starts from."""
    for note in notes:
        say(note, "yellow")
        logging.getLogger(__name__).info(note)


def say_stopping() -> None:
    say("stopping after this step, with a checkpoint; once more to stop at once", "yellow")


def say_stopped(run_dir: RunDir, step: int) -> None:
    say(
        f"stopped after step {step}; go on with: lora-moe-rl train {run_dir.config_file} --resume",
        "yellow",
    )


def log_to(path: Path) -> None:
    """Standard logging of the controller's process: everything into `path`, warnings to stderr."""
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter(FORMAT))
    to_stderr = logging.StreamHandler()
    to_stderr.setLevel(logging.WARNING)
    to_stderr.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_stderr], force=True)
