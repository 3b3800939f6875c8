"""Plants bugs on purpose, one at a time, and shows that the fast tests see them.

    python tests/mutants/run.py                 all of them
    python tests/mutants/run.py NAME ...        some of them

A mutant is a slip of a line or two that raises nothing: an entry of a .toml file here, with the
text that it replaces and the nearest tests, which are among those that `make test` runs. It is
planted in a copy of the tree, so that the working tree is never touched. The nearest tests run once
without any; then with each:

    caught      one of them fails
    SURVIVED    they all pass
    broken      they cannot be collected: no slip, but a crash that anything would notice
    stale       the text to replace does not stand exactly once in its file
    timeout     they did not end

Of must.toml every mutant has to be caught. Of the others MOST_SURVIVORS may survive, each with its
reason in `survives`. Exits with 1 when it is otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MUST = "must.toml"
MOST_SURVIVORS = 2
TIMEOUT_S = 900.0
NOT_COPIED = (
    ".git", ".venv", "runs", "wandb", "build", "dist", "*.egg-info", "__pycache__", ".*_cache",
)  # fmt: skip
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.M)


@dataclass(frozen=True)
class Mutant:
    """`does`: to a user, if nobody notices. `old` stands exactly once in `file` and becomes `new`.
    `tests`: what pytest is asked, the quickest first. `must`: it may not survive; `survives`: why
    this one does."""

    name: str
    does: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    must: bool
    survives: str = ""

    def applied_to(self, text: str) -> str:
        """The file's text with the bug in it. Raises ValueError when the mutant is stale."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name} is stale: its text stands {found} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    what: str
    test: str = ""  # that caught it
    seconds: float = 0.0

    @property
    def row(self) -> str:
        return f"{self.mutant.name:36} {self.what:9} {self.seconds:6.1f}  {self.test}"


def load() -> list[Mutant]:
    """All mutants, those that must be caught first."""
    files = sorted(HERE.glob("*.toml"), key=lambda path: (path.name != MUST, path.name))
    return [
        Mutant(**entry | {"tests": tuple(entry["tests"])}, must=path.name == MUST)
        for path in files
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        yield tree


def pytest(tree: Path, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """(exit code, output) of the tests in a copy; None for the code when they did not end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    # Two files of the same size, written in one second, share compiled code: none is written.
    variables = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*command, "-m", "not slow", *tests],
        cwd=tree,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def judge(tree: Path, mutant: Mutant, timeout_s: float) -> Verdict:
    """Plants a mutant in the copy, asks its tests, and takes it out again."""
    started = time.perf_counter()
    file = tree / mutant.file
    sound = file.read_text()
    try:
        file.write_text(mutant.applied_to(sound))
    except ValueError:
        return Verdict(mutant, "stale")
    try:
        code, output = pytest(tree, mutant.tests, timeout_s)
    finally:
        file.write_text(sound)
    what = {None: "timeout", 0: "SURVIVED", 1: "caught"}.get(code, "broken")
    found = FAILED.search(output) if what == "caught" else None
    seconds = time.perf_counter() - started
    return Verdict(mutant, what, found[1] if found else "", seconds)


def faults(verdicts: Sequence[Verdict]) -> list[str]:
    """What is not as it has to be, a line each."""
    lines = [
        f"{v.mutant.name}: {v.what}; {v.mutant.does}"
        for v in verdicts
        if v.what != "caught" and (v.mutant.must or v.what != "SURVIVED" or not v.mutant.survives)
    ]
    lines += [
        f"{v.mutant.name} is caught by now: take its `survives` out"
        for v in verdicts
        if v.what == "caught" and v.mutant.survives
    ]
    survivors = [v for v in verdicts if v.what == "SURVIVED"]
    if len(survivors) > MOST_SURVIVORS:
        lines.append(f"{len(survivors)} survive, {MOST_SURVIVORS} may")
    return lines


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Raises SystemExit for a name that no mutant has."""
    mutants = load()
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        known = "\n  ".join(mutant.name for mutant in mutants)
        raise SystemExit(f"no mutant is called {', '.join(sorted(unknown))}; there are\n  {known}")
    return [mutant for mutant in mutants if not names or mutant.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="seconds that a mutant's tests may take"
    )
    arguments = parser.parse_args()
    mutants = chosen(arguments.names)
    with copy_of_the_tree() as tree:
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        print(f"the nearest tests without a mutant ({len(tests)} places) ...", flush=True)
        code, output = pytest(tree, tests, timeout_s=arguments.timeout * 4)
        if code != 0:
            print(output)
            print("these tests have to be green before a mutant can be judged")
            return 1
        print(f"{'mutant':36} {'verdict':9} {'s':>6}  caught by")
        verdicts = []
        for mutant in mutants:
            verdicts.append(judge(tree, mutant, arguments.timeout))
            print(verdicts[-1].row, flush=True)
    for verdict in verdicts:
        if verdict.what == "SURVIVED":
            print(f"{verdict.mutant.name} survives: {verdict.mutant.survives or 'no reason given'}")
    wrong = faults(verdicts)
    caught = sum(verdict.what == "caught" for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} caught", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
