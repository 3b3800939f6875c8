"""What a run keeps of who did what when, and what is made of it."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from lora_moe_rl.errors import RunDirError
from lora_moe_rl.telemetry import timeline_views
from lora_moe_rl.telemetry.timeline import Span, Timeline, covered, idle


class Hand:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def made():
    clock, lines = Hand(), []
    return Timeline(2, lines.append, clock), clock, lines


def test_idle_shares_by_hand(made):
    """Of ten seconds the trainer updates 3 and publishes 1; engine 0 samples from 2 on, and goes
    on; engine 1 samples two prompts at once from 0 to 4."""
    timeline, clock, lines = made
    with timeline.span("engine-1", "sample", 0), timeline.span("engine-1", "sample", 1):
        clock.now = 102
        going_on = timeline.span("engine-0", "sample", 2)
        going_on.__enter__()
        clock.now = 104
    with timeline.span("trainer", "update", 1):
        clock.now = 107
    with timeline.span("publish", "publish", 1):
        clock.now = 108
    clock.now = 110
    assert timeline.step(1) == pytest.approx({"idle/trainer": 0.6, "idle/engines": 0.4})
    clock.now = 115
    going_on.__exit__(None, None, None)
    clock.now = 120
    assert timeline.step(2) == pytest.approx({"idle/trainer": 1.0, "idle/engines": 0.75})
    assert [(line["step"], line["begin"], line["end"]) for line in lines] == [
        (1, 100, 110),
        (2, 110, 120),
    ]
    assert ["publish", "publish", 1, 107, 1] in lines[0]["spans"] and len(lines[0]["spans"]) == 4
    assert lines[1]["spans"] == [["engine-0", "sample", 2, 102, 13]]


def test_overlapping_spans_count_once():
    spans = [
        Span("e", "sample", n, *at) for n, at in enumerate([(0, 4), (1, 2), (3, 6), (8, None)])
    ]
    assert covered(spans, 1, 10) == 7  # 1 to 6, and 8 to 10
    assert idle(spans, 0, 10, 1) == {"idle/trainer": 1, "idle/engines": 1}  # "e" is no engine's


def test_waiting_is_not_work_and_waits_that_follow_each_other_are_one(made):
    timeline, clock, lines = made
    for end in (101, 103):
        with timeline.wait("scored groups"):
            clock.now = end
    with timeline.wait("the oldest groups"):
        clock.now = 104
    with timeline.wait("a ticket to roll"):  # there are as many as tickets may be under way
        clock.now = 105
    clock.now = 110
    assert timeline.step(1)["idle/trainer"] == 1
    assert lines[0]["spans"] == [
        ["trainer", "wait: scored groups", 0, 100, 3],
        ["trainer", "wait: the oldest groups", 0, 103, 1],
    ]


def test_what_fails_has_a_span_too(made):
    timeline, clock, lines = made
    with pytest.raises(ValueError), timeline.span("engine-0", "sample", 7):
        clock.now = 103
        raise ValueError
    timeline.step(1)
    assert lines[0]["spans"] == [["engine-0", "sample", 7, 100, 3]]


SPANS = [
    ["feed", "wait: a slot", 0, 100.0, 10.0],
    ["engine-0", "sample", 4, 100.0, 3.0],
    ["engine-0", "sample", 5, 101.0, 4.0],
    ["engine-0", "sample", 6, 104.0, 2.0],
    ["engine-10", "sample", 7, 100.0, 9.0],
    ["engine-2", "sample", 8, 100.0, 9.0],
    ["rewards", "reward", 4, 103.0, 0.5],
    ["trainer", "update", 3, 105.0, 4.0],
    ["publish", "publish", 9, 109.0, 1.0],
]


def a_run(folder, steps=(3,)):
    with open(folder / "timeline.jsonl", "w") as file:
        for step in steps:
            record = {"step": step, "begin": 100.0, "end": 110.0, "spans": SPANS}
            file.write(json.dumps(record) + "\n")
    return folder


def test_the_trace_is_in_chromes_trace_event_format(tmp_path):
    timeline_views.write(a_run(tmp_path))
    traced = json.loads((tmp_path / "timeline.trace.json").read_text())
    events = traced["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    expected = ["feed", "engine-0", "engine-2", "engine-10", "rewards", "trainer", "publish"]
    assert [names[pid] for pid in sorted(names)] == expected
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(SPANS)
    for event in spans:
        assert {"name", "cat", "ts", "dur", "pid", "tid"} <= set(event)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    update = next(event for event in spans if event["name"] == "update 3")
    assert names[update["pid"]] == "trainer" and (update["ts"], update["dur"]) == (5e6, 4e6)
    # Those of one thread follow each other: 4 and 5 overlap, 6 begins when 4 is over.
    lanes = {e["name"]: e["tid"] for e in spans if names[e["pid"]] == "engine-0"}
    assert lanes == {"sample 4": 0, "sample 5": 1, "sample 6": 0}
    assert [e["name"] for e in events if e["ph"] == "i"] == ["step 3"]


def test_the_command_draws_the_last_steps_of_a_run(tmp_path, capsys):
    a_run(tmp_path, steps=(1, 2, 3))
    assert timeline_views.main([str(tmp_path), "--steps", "2"]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "timeline.png"),
        str(tmp_path / "timeline.trace.json"),
    ]
    with Image.open(tmp_path / "timeline.png") as picture:
        assert picture.width > 1000 and len(set(picture.convert("RGB").getdata())) > 20
    traced = json.loads((tmp_path / "timeline.trace.json").read_text())
    marks = [event["name"] for event in traced["traceEvents"] if event["ph"] == "i"]
    assert marks == ["step 2", "step 3"]


def test_a_run_without_a_step_has_nothing_to_draw(tmp_path):
    with pytest.raises(RunDirError, match="timeline.jsonl has no step"):
        timeline_views.main([str(tmp_path)])


def test_pieces_of_time_say_how_many_spans_there_are():
    spans = [Span("e", "sample", 0, 0.0, 3.0), Span("e", "sample", 1, 1.0, 2.0)]
    begins, ends, counts = timeline_views._at_once([*spans, Span("e", "sample", 2, 5.0, 6.0)])
    assert begins.tolist() == [0, 1, 2, 5] and ends.tolist() == [1, 2, 3, 6]
    assert counts.tolist() == [1, 2, 1, 1]
