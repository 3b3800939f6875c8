"""What a run says on the terminal: one line a step, a progress bar, and who started.

Progress is shown on a terminal only; everything else goes to pipes and files as well. `speak`
chooses less: only warnings, on stderr, or beside them each step's record as a line of JSON. A
console that cannot be written ends no run (`streams.py`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lora_moe_rl.cluster.log import FORMAT
from lora_moe_rl.config import EvalConfig, RunConfig
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.jsonl import to_json
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry import names
from lora_moe_rl.telemetry.streams import ERR, OUT

HEADER_EVERY = 20
POLL_S = 0.5
Bar = Callable[[int], None]

# Metric -> heading, width, format. Of a step that makes one update the loss says nothing: its ratio
# is 1, and advantages of a group add up to 0.
_COLUMNS = {
    names.REWARD: ("reward", 8, ".3f"),
    names.SOLVED_NONE: ("unsolved", 9, ".0%"),
    names.RESPONSE_LENGTH: ("length", 8, ",.1f"),
    names.TRUNCATED: ("cut", 5, ".0%"),
    names.ENTROPY: ("entropy", 8, ".3f"),
    names.LOSS: ("loss", 10, "+.2e"),
    names.GRAD_NORM: ("gradient", 10, ".2e"),
    names.MISMATCH_KL: ("mismatch", 10, ".1e"),
    names.time("rollout"): ("rollout s", 10, ".2f"),
    names.time("train"): ("train s", 8, ".2f"),
    names.STEP_SECONDS: ("step s", 8, ".2f"),
}
# The same of a run that learns from the rows' own answers.
_OFFLINE = {
    "answers": {
        names.NLL: ("loss", 8, ".4f"),
        names.PERPLEXITY: ("perplexity", 11, ".4g"),
    },
    "pairs": {
        names.DPO: ("loss", 8, ".4f"),
        names.MARGIN: ("margin", 9, "+.3f"),
        names.ACCURACY: ("right", 7, ".0%"),
    },
}
_OFFLINE_ALWAYS = (names.ENTROPY, names.GRAD_NORM, names.time("train"), names.STEP_SECONDS)
# What a terminal goes without that is too narrow for all, the first first: it is in metrics.jsonl.
_SPARED = (
    *(names.GRAD_NORM, names.time("rollout"), names.time("train")),
    *(names.SOLVED_NONE, names.ENTROPY, names.LOSS),
)
_STEP, _WAITING, _LEFT = ("step", 8), ("waiting", 13), ("left", 8)
_STEPS_OF_ETA = 20
SHOWN_OF_EVAL = ("avg", "avg_ci95", "response_length", "truncated", "failed")

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())  # without a log nothing is said a second time

Way = Literal["lines", "quiet", "json"]
_way: Way = "lines"
_console = Console(file=OUT, highlight=False, emoji=False, soft_wrap=True)
_errors = Console(file=ERR, highlight=False, emoji=False, soft_wrap=True, stderr=True)


def speak(way: Way) -> None:
    """Sets the way in which this process says things from now on."""
    global _way
    _way, _console.quiet = way, way != "lines"


def show(what: Any, wrapped: bool = False) -> None:
    """A text or table of rich's; `wrapped`: at the width of the terminal."""
    _console.print(what, soft_wrap=not wrapped)


class StepLines:
    """A step as one aligned line, under a header every twenty lines. `width`: columns of the
    terminal; None: of this process's, and in a pipe as many as there are."""

    def __init__(self, config: RunConfig, width: int | None = None):
        self._total = config.trainer.steps
        self._columns = dict(_COLUMNS)
        if config.offline:
            every = {name: _COLUMNS[name] for name in _OFFLINE_ALWAYS}
            length = {names.ANSWER_LENGTH: ("length", 8, ",.1f")}
            self._columns = _OFFLINE[config.learns_from] | length | every
        elif config.algorithm.on_policy:
            del self._columns[names.LOSS]
        self._ahead = config.schedule.lag > 0  # else trainer and engines take turns
        self._seconds: deque[float] = deque(maxlen=_STEPS_OF_ETA)
        self._lines = 0
        if width is None and _console.is_terminal:
            width = _console.width
        for metric in _SPARED:
            if width is not None and len(self.header) > width:
                self._columns.pop(metric, None)

    @property
    def header(self) -> str:
        pairs = [_STEP, *((heading, width) for heading, width, _ in self._columns.values())]
        pairs += [_WAITING, _LEFT] if self._ahead else [_LEFT]
        return "".join(heading.rjust(width) for heading, width in pairs)

    def line(self, record: dict[str, Any]) -> str:
        """The next step's. A number that it has none of (no rewards: the mean is NaN) reads `-`;
        the last column is the time that is left, by the steps before."""
        self._seconds.append(record.get(names.STEP_SECONDS, 0.0))
        mean = sum(self._seconds) / len(self._seconds)
        cells = [f"{record['step']}/{self._total}".rjust(_STEP[1])]
        for metric, (_, width, form) in self._columns.items():
            cells.append(_number(record.get(metric), form).rjust(width))
        if self._ahead:
            cells.append(_waiting(record).rjust(_WAITING[1]))
        left = (self._total - record["step"]) * mean
        return "".join([*cells, _duration(left).rjust(_LEFT[1])])

    def show(self, record: dict[str, Any]) -> None:
        if _way == "json":
            print(to_json(record), file=OUT, flush=True)
            return
        if self._lines % HEADER_EVERY == 0:
            _console.print(Text(self.header, style="bold"))
        self._lines += 1
        _console.print(Text(self.line(record)))


def show_evaluation(record: dict[str, Any], config: EvalConfig) -> None:
    """A line for each set: the mean reward with its 95 % interval, then what else it has."""
    for name, settings in config.sets.items():
        own = {what: record[names.of_eval(name, what)] for what in SHOWN_OF_EVAL}
        cells = [f"avg {_number(own['avg'], '.3f')} ±{_number(own['avg_ci95'], '.3f')}"]
        more = [f"pass@{k}" for k in settings.ks]
        more += [] if settings.answer is None else [f"maj@{settings.samples}"]
        for what in more:
            cells.append(f"{what} {_number(record[names.of_eval(name, what)], '.3f')}")
        cells += [f"length {own['response_length']:,.1f}", f"cut {own['truncated']:.0%}"]
        if own["failed"]:
            cells.append(f"failed {own['failed']:.0f}")
        cells.append(f"{record[names.EVAL_SECONDS]:.1f} s")
        say(f"eval {name} after step {record['step']}: {', '.join(cells)}", "cyan")


def show_held_out(record: dict[str, Any], config: EvalConfig) -> None:
    """A line for each set of an algorithm that learns from answers: all that it tells of it."""
    for name in config.sets:
        found = {key.removeprefix(names.of_eval(name, "")): value for key, value in record.items()}
        own = [what for what in found if names.of_eval(name, what) in record and "/" not in what]
        cells = [f"{what} {_number(found[what], '.4g')}" for what in own if what != "prompts"]
        cells = [f"{found['prompts']:,.0f} rows", *cells, f"{record[names.EVAL_SECONDS]:.1f} s"]
        say(f"eval {name} after step {record['step']}: {', '.join(cells)}", "cyan")


def _waiting(record: dict[str, Any]) -> str:
    """Who waits for the other more, the trainer for samples or the engines for a version, and for
    what share of the step."""
    shares = {"trainer": record[names.IDLE_TRAINER], "engines": record[names.IDLE_ENGINES]}
    who = max(shares, key=lambda who: shares[who])
    return f"{who} {shares[who]:.0%}"


def _duration(seconds: float) -> str:
    """0:42, 1:05:00 or 3d 04h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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


class Starting:
    """What is said while a run starts, which takes the better part of a minute: on a terminal one
    line with the time, what is done and the state of each actor, twice a second; in a pipe a line
    whenever an actor's state changes. A context manager, which may be entered again."""

    def __init__(self):
        self._what = "looking at the settings"
        self._states: Callable[[], dict[str, str]] = dict
        self._since = time.monotonic()

    def begin(self, what: str) -> None:
        self._what = what

    def watch(self, states: Callable[[], dict[str, str]]) -> None:
        """`states`: of each actor, asked twice a second from a thread of this object's own."""
        self._states = states

    def __enter__(self) -> Starting:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if _console.is_terminal:
            with _console.status(self._text()) as status:
                while not self._ended.wait(POLL_S):
                    status.update(self._text())
            return
        told: dict[str, str] = {}
        while not self._ended.wait(POLL_S):
            states = self._states()
            if states != told:
                _console.print(Text(self._text()))
            told = states

    def _text(self) -> str:
        states = ", ".join(f"{name} {state}" for name, state in self._states().items())
        seconds = f"{time.monotonic() - self._since:.0f} s"
        return f"{self._what}, {seconds}{': ' if states else ''}{states}"


def say(message: str, style: str = "") -> None:
    _console.print(Text(message, style=style))


def warn(message: str) -> None:
    """Warns on stderr, as what goes to stdout may be read by a program; and in the log, if there is
    one: nobody may look at the console."""
    log.warning(message)
    _errors.print(Text("warning: ", style="yellow"), Text(message), sep="")


def say_started(trainer: list[dict[str, Any]], engines: list[dict[str, Any]]) -> None:
    """`trainer` and `engines` are what each actor told of itself."""
    for kind, actors in (("trainer", trainer), ("engine", engines)):
        for index, facts in enumerate(actors):
            say(f"{kind}-{index}: {_facts(facts)}", "dim")


def say_offline(config: RunConfig) -> None:
    say(
        f"no engines: algorithm={config.algorithm.name} learns from the rows' own answers; nothing "
        "is sampled, scored or served, and routers choose freely",
        "dim",
    )


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


def warn_skipped(found: Found) -> None:
    """Which newer checkpoints are not taken, and why."""
    for path, reason in found.skipped:
        warn(f"skipped {path}: {reason}")


def say_resume(found: Found) -> None:
    warn_skipped(found)
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
        log.info(note)


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
    to_stderr = logging.StreamHandler(ERR)
    to_stderr.setLevel(logging.WARNING)
    to_stderr.addFilter(lambda record: record.name != __name__)  # which says it there itself
    to_stderr.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_stderr], force=True)
