"""Functions by name, and why one cannot be had."""

import sys

import pytest

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import absolute_spec, load_function


@pytest.fixture(autouse=True)
def _restore_import_state(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_from_a_file_and_from_a_module(tmp_path):
    (tmp_path / "helpers.py").write_text("TWO = 2\n")
    (tmp_path / "my_rewards.py").write_text(
        "from helpers import TWO\n"
        "def length(completions, **columns):\n    return [TWO * len(c) for c in completions]\n"
        "class Judge:\n    @staticmethod\n    def score(**columns): return 7\n"
    )
    assert load_function("my_rewards.py:length")(completions=["abc"]) == [6]
    assert load_function(f"{tmp_path}/my_rewards.py:Judge.score")() == 7
    assert load_function("my_rewards:length")(completions=["a"]) == [2]
    assert load_function("math:sqrt")(4) == 2


def test_a_file_is_run_once_and_two_of_one_name_are_two(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def where(): return {folder!r}\n")
    assert load_function("a/reward.py:where") is load_function(f"{tmp_path}/a/reward.py:where")
    assert load_function("a/reward.py:where")() == "a"
    assert load_function("b/reward.py:where")() == "b"


def test_a_file_does_not_shadow_an_installed_package(tmp_path):
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')\n")
    (tmp_path / "reward.py").write_text("import json\ndef f(): return json.dumps(1)\n")
    assert load_function("reward.py:f")() == "1"


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("reward", ["'reward'", "module:function or file.py:function"]),
        ("reward.py:", ["module:function or file.py:function"]),
        (":f", ["module:function or file.py:function"]),
        ("nowhere.py:f", ["nowhere.py", "no such file"]),
        ("nowhere_module:f", ["no module 'nowhere_module'", "install it, or name a file"]),
        ("good.py:missing", ["has no 'missing'", "It has one, two"]),
        ("good.py:tow", ["did you mean two? It has one, two"]),
        (
            "lora_moe_rl.rewards:exactmatch",
            ["did you mean exact_match? It has ", "exact_match, math_verify"],
        ),
        ("good.py:CONSTANT", ["CONSTANT is a int, not a function"]),
        ("raises.py:f", ["raises.py", "ZeroDivisionError: division by zero (line 2)"]),
        ("leaves.py:f", ["cannot import ", "leaves.py: SystemExit: 3 (line 3)"]),
        ("leaves:f", ["importing leaves failed: SystemExit: 3"]),
        ("syntax.py:f", ["syntax.py", "(line 1)"]),
        ("needs.py:f", ["needs.py", "No module named 'not_installed_here' (line 1)"]),
        ("needs:f", ["importing needs failed", "No module named 'not_installed_here'"]),
    ],
)
def test_what_cannot_be_imported_and_why(tmp_path, spec, parts):
    (tmp_path / "good.py").write_text("CONSTANT = 1\ndef two(): ...\ndef one(): ...\n")
    (tmp_path / "raises.py").write_text("def f(): ...\n1 / 0\n")
    (tmp_path / "leaves.py").write_text("import sys\ndef f(): ...\nsys.exit(3)\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "needs.py").write_text("import not_installed_here\ndef f(): ...\n")
    with pytest.raises(ConfigError) as caught:
        load_function(spec)
    for part in parts:
        assert part in str(caught.value)


def test_a_file_that_failed_is_tried_again(tmp_path):
    (tmp_path / "reward.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError):
        load_function("reward.py:f")
    (tmp_path / "reward.py").write_text("def f(): return 'mended'\n")
    assert load_function("reward.py:f")() == "mended"


def test_absolute_names_hold_in_any_directory(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text("def f(): return 1\n")
    spec = absolute_spec("reward.py:f")
    assert spec == f"{tmp_path}/reward.py:f"
    monkeypatch.chdir("/")
    assert load_function(spec)() == 1
    assert absolute_spec("math:sqrt") == "math:sqrt"
    with pytest.raises(ConfigError, match="there is no file"):
        absolute_spec("reward.py:f")
