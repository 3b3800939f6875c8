"""Spans of some steps."""

from recorded_run import record, timeline_of

from lora_moe_rl.page.spans import Spans


def test_the_steps_asked_for_come_as_they_were_written(tmp_path):
    spans = Spans(record(tmp_path / "run").timeline_file)
    found = spans.of_steps(4, 2)
    assert found == {"first": 1, "newest": 6, "steps": [timeline_of(3), timeline_of(4)]}
    assert [one["step"] for one in spans.of_steps(None, 3)["steps"]] == [4, 5, 6]
    nothing = Spans(tmp_path / "none.jsonl").of_steps(None, 3)
    assert nothing == {"first": None, "newest": None, "steps": []}
