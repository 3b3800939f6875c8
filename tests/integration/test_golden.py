"""A run does to the last bit what it did before the house was rebuilt (tests/golden)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"

pytestmark = pytest.mark.timeout(900)


def load_runs():
    spec = importlib.util.spec_from_file_location("golden_runs", GOLDEN / "runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runs = load_runs()


@pytest.mark.slow
@pytest.mark.whole
def test_the_demo_and_its_resumed_copy_are_equal_to_the_bit(tmp_path):
    kept = json.loads((GOLDEN / "demo.json").read_text())
    if (here := runs.machine("qwen3_moe")) != kept["machine"]:
        pytest.skip(f"the figures are of {kept['machine']}, this is {here}")
    assert runs.check("demo", tmp_path) == []


def test_a_figure_that_moves_is_named():
    kept = json.loads((GOLDEN / "demo.json").read_text())
    moved = json.loads((GOLDEN / "demo.json").read_text())
    moved["metrics"][1]["loss/policy"] *= 1 + 1e-15
    moved["samples"][0]["response"] += "1"
    first, second = runs.differences(kept, moved)
    assert first.startswith("sample 0: response was ")
    assert second.startswith("step 2: loss/policy was ")
    moved["metrics"][1]["loss/policy"] = kept["metrics"][1]["loss/policy"]
    moved["metrics"][0]["loss/new"] = 1.0
    assert runs.differences(kept, moved) == [first]
