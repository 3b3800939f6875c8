"""Columns of metrics.jsonl."""

import json

from recorded_run import config_in, record

from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.page.metrics import LOST, MetricsTable


def test_columns_are_what_the_run_wrote_and_an_answer_goes_on_where_the_last_one_ended(tmp_path):
    run_dir = record(tmp_path / "run", range(1, 4))
    table = MetricsTable(run_dir.metrics_file)
    assert "reward/mean" in table.names() and "step" not in table.names()
    found = table.columns(["reward/mean", "nothing"])
    assert found["steps"] == [1, 2, 3] and found["whole"]
    assert found["columns"] == {"reward/mean": [0.1, 0.2, 0.3], "nothing": [None] * 3}
    record(tmp_path / "run", range(4, 6), True)
    more = table.columns(["reward/mean"], found["lines"], found["generation"])
    assert (more["steps"], more["columns"]["reward/mean"]) == ([4, 5], [0.4, 0.5])
    assert not more["whole"]


def test_lines_of_one_step_are_one_row_and_a_row_that_changed_is_sent_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": null, "text": "x"}\n')
    table = MetricsTable(path)
    found = table.columns(["a"])
    assert found["columns"]["a"] == [1.0, LOST] and table.names() == ["a"]
    with open(path, "a") as file:
        file.write(json.dumps({"step": 1, "eval/test/avg@4": 0.5}) + "\n")
    more = table.columns(["a", "eval/test/avg@4"], found["lines"], found["generation"])
    assert more["steps"] == [1]
    assert more["columns"] == {"a": [1.0], "eval/test/avg@4": [0.5]}


def test_a_step_without_a_metric_is_another_thing_than_one_whose_number_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ('"step": 1, "a": 1.0, "eval": 0.5', '"step": 2, "a": null', '"step": 3, "a": NaN')
    path.write_text("".join(f"{{{line}}}\n" for line in (*lines, '"step": 4, "a": 2.0, "eval": 1')))
    columns = MetricsTable(path).columns(["a", "eval"])["columns"]
    assert columns == {"a": [1.0, LOST, LOST, 2.0], "eval": [0.5, None, None, 1]}


def test_a_run_that_went_back_is_read_anew(tmp_path):
    run_dir = record(tmp_path / "run", range(1, 6))
    table = MetricsTable(run_dir.metrics_file)
    before = table.columns(["reward/mean"])
    with RunDir(config_in(tmp_path / "run"), resume=True) as again:
        again.rewind(2)
    after = table.columns(["reward/mean"], before["lines"], before["generation"])
    assert after["whole"] and after["steps"] == [1, 2]


def test_a_run_that_has_written_nothing_yet_has_no_row(tmp_path):
    """It has failed before its first step, or is in it."""
    path = tmp_path / "metrics.jsonl"
    table = MetricsTable(path)
    found = table.columns(["a"])
    assert found["steps"] == [] and found["columns"] == {"a": []} and table.names() == []
    path.write_text('{"step": 1, "a": 1.0}\n')
    more = table.columns(["a"], found["lines"], found["generation"])
    assert more["steps"] == [1] and more["columns"] == {"a": [1.0]}
