"""Spans of some steps."""

import re
from pathlib import Path

from recorded_run import record, timeline_of

from lora_moe_rl import page
from lora_moe_rl.page.spans import Spans
from lora_moe_rl.telemetry.timeline_views import COLORS


def test_the_steps_asked_for_come_as_they_were_written(tmp_path):
    spans = Spans(record(tmp_path / "run").timeline_file)
    found = spans.of_steps(4, 2)
    assert found == {"first": 1, "newest": 6, "steps": [timeline_of(3), timeline_of(4)]}
    assert [one["step"] for one in spans.of_steps(None, 3)["steps"]] == [4, 5, 6]
    nothing = Spans(tmp_path / "none.jsonl").of_steps(None, 3)
    assert nothing == {"first": None, "newest": None, "steps": []}


def test_the_page_and_the_picture_draw_the_same_kinds_of_work():
    script = (Path(page.__file__).parent / "web/timeline.js").read_text()
    (drawn,) = re.findall(r"const WORK = {(.*)};", script)
    assert re.findall(r"(\w+):", drawn) == list(COLORS)
