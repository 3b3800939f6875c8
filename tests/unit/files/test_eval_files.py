"""Samples of evaluations on disk."""

from __future__ import annotations

import resource

from lora_moe_rl.files import eval_files
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.trouble import Trouble


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


def test_samples_that_the_disk_refuses_wait_for_the_next_evaluation(tmp_path):
    said: list[str] = []
    files = eval_files.EvalFiles(tmp_path, Trouble(said.append))
    (tmp_path / "eval").write_text("")  # where the directory would be
    files.write(2, [{"row": 2}])
    assert len(said) == 1 and "cannot write samples of an evaluation: " in said[0]
    assert said[0].endswith("those after step 2 wait in memory")
    (tmp_path / "eval").unlink()
    files.write(4, [{"row": 4}])
    for step in (2, 4):
        assert list(read_jsonl(eval_files.path_of(tmp_path, step))) == [{"row": step}]
    assert said[1:] == ["samples of an evaluation can be written again"]


def test_of_samples_that_fit_by_half_nothing_stays_on_a_full_disk(tmp_path):
    """It would keep the room that checkpoints want."""
    said: list[str] = []
    files = eval_files.EvalFiles(tmp_path, Trouble(said.append))
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, usual[1]))
    try:
        files.write(2, [{"text": "x" * (1 << 13)}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert "File too large; those after step 2 wait" in said[0]
    assert [*(tmp_path / "eval").iterdir()] == []
    files.close()
    (record,) = read_jsonl(eval_files.path_of(tmp_path, 2))
    assert len(record["text"]) == 1 << 13


def test_of_samples_that_the_disk_refuses_the_newest_wait_and_a_loss_is_said(tmp_path):
    said: list[str] = []
    files = eval_files.EvalFiles(tmp_path, Trouble(said.append))  # within one minute
    (tmp_path / "eval").write_text("")
    for step in (2, 4, 6):
        files.write(step, [{"row": step}])
    lost = "samples of an evaluation, that after step {}, are lost".format
    assert said[1:] == [lost(2), lost(4)]
    (tmp_path / "eval").unlink()
    files.close()
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["step-000006.jsonl"]
    assert said[3:] == ["samples of an evaluation can be written again"]


def test_what_the_disk_refuses_to_the_end_is_lost_and_said(tmp_path):
    said: list[str] = []
    files = eval_files.EvalFiles(tmp_path, Trouble(said.append))
    files.close()
    (tmp_path / "eval").write_text("")
    files.write(2, [{"row": 2}])
    files.close()
    files.close()
    assert said[1:] == ["samples of an evaluation, that after step 2, are lost"]
