"""The list of mutants (tests/mutants) does not rot: each can still be planted, and its tests are
there and among those of `make test`. Whether they catch it is for `make mutants`."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_runner():
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests/mutants/run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


runner = load_runner()
MUTANTS = runner.load()


def is_slow(node: ast.AST) -> bool:
    return "mark.slow" in ast.unparse(node)


@cache
def quick_tests(file: str) -> set[str]:
    """Names of the tests of a file that are not marked slow."""
    module = ast.parse((ROOT / file).read_text())
    for node in module.body:
        is_mark = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        if is_mark and is_slow(node):
            return set()
    functions = (n for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f.name for f in functions if not any(is_slow(d) for d in f.decorator_list)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted_and_its_tests_are_there(mutant):
    sound = (ROOT / mutant.file).read_text()
    planted = mutant.applied_to(sound)
    compile(planted, mutant.file, "exec")
    assert planted != sound and mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        found = quick_tests(file)
        assert name in found if name else any(one.startswith("test_") for one in found), test


def test_names_are_given_once_and_enough_may_not_survive():
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert sum(mutant.must for mutant in MUTANTS) >= 11
    assert sum(not mutant.must for mutant in MUTANTS) >= 40
    assert sum(bool(mutant.survives) for mutant in MUTANTS) <= runner.MOST_SURVIVORS


def test_a_mutant_whose_text_is_gone_or_there_twice_is_stale(tmp_path):
    mutant = runner.Mutant("m", "", "file.py", "x = 1\n", "x = 2\n", (), must=False)
    assert mutant.applied_to("x = 1\ny = x\n") == "x = 2\ny = x\n"
    for text in ("x = 3\n", "x = 1\nx = 1\n"):
        (tmp_path / "file.py").write_text(text)
        assert runner.judge(tmp_path, mutant, 1.0).what == "stale"
        assert (tmp_path / "file.py").read_text() == text


@pytest.mark.seconds  # starts pytest
@pytest.mark.parametrize(
    ("new", "what"),
    [("1 + 2", "caught"), ("1 * 2", "SURVIVED"), ("1 +", "broken")],
)
def test_a_verdict_is_what_the_nearest_tests_say(tmp_path, new, what):
    (tmp_path / "two.py").write_text("VALUE = 1 + 1\n")
    (tmp_path / "test_two.py").write_text(
        "import two\n\ndef test_two():\n    assert two.VALUE == 2\n"
    )
    mutant = runner.Mutant("m", "", "two.py", "1 + 1", new, ("test_two.py",), must=False)
    verdict = runner.judge(tmp_path, mutant, 60.0)
    assert verdict.what == what
    assert verdict.test == ("test_two.py::test_two" if what == "caught" else "")
    assert (tmp_path / "two.py").read_text() == "VALUE = 1 + 1\n"


@pytest.mark.seconds
def test_tests_that_do_not_end_are_ended(tmp_path):
    (tmp_path / "two.py").write_text("VALUE = 1 + 1\n")
    (tmp_path / "test_two.py").write_text("import time\n\ndef test_two():\n    time.sleep(600)\n")
    mutant = runner.Mutant("m", "", "two.py", "1 + 1", "3", ("test_two.py",), must=False)
    assert runner.judge(tmp_path, mutant, 0.5).what == "timeout"


def test_what_may_survive_and_what_may_not():
    def verdict(what, must=False, survives=""):
        mutant = runner.Mutant(f"{what} {must}", "harm", "f", "a", "b", (), must, survives)
        return runner.Verdict(mutant, what)

    expected = verdict("SURVIVED", survives="nobody can see it")
    assert runner.faults([verdict("caught", must=True), expected, expected]) == []
    assert runner.faults([verdict("SURVIVED")]) == ["SURVIVED False: SURVIVED; harm"]
    assert len(runner.faults([verdict("SURVIVED", must=True, survives="reason")])) == 1
    for what in ("stale", "broken", "timeout"):
        assert len(runner.faults([verdict(what, survives="reason")])) == 1
    assert runner.faults([expected] * 3) == ["3 survive, 2 may"]
    assert "take its `survives` out" in runner.faults([verdict("caught", survives="reason")])[0]
