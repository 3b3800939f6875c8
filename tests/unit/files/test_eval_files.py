"""Samples of evaluations on disk."""

from __future__ import annotations

from lora_moe_rl.files import eval_files
from lora_moe_rl.files.jsonl import read_jsonl


def test_an_evaluation_that_is_made_again_replaces_what_was_left(tmp_path):
    eval_files.write(tmp_path, 3, [{"row": 0}, {"row": 1}])
    eval_files.write(tmp_path, 3, [{"row": 2, "reward": float("nan")}])
    assert list(read_jsonl(eval_files.path_of(tmp_path, 3))) == [{"row": 2, "reward": None}]


def test_a_run_that_goes_on_sets_later_evaluations_aside(tmp_path):
    eval_files.rewind(tmp_path, 0)  # there is none yet
    for step in (0, 2, 4):
        eval_files.write(tmp_path, step, [{"step": step}])
    eval_files.rewind(tmp_path, 2)
    names = sorted(path.name for path in (tmp_path / "eval").iterdir())
    assert names == ["step-000000.jsonl", "step-000002.jsonl", "step-000004.jsonl.bak"]
