"""When the loop evaluates and writes checkpoints, and who waits for it."""

from __future__ import annotations

import pytest
from loop_run import evaluating, of_steps, run


def test_with_lag_0_evaluations_come_between_steps():
    made = run(config=evaluating(0))
    told = ("evaluate", "roll ", "update")
    assert [event for event in made.events if event.startswith(told)] == [
        *("evaluate 0 at 0", "evaluated 0"),
        *("roll 0", "roll 1", "update", "evaluate 1 at 1", "evaluated 1"),
        *("roll 2", "roll 3", "update", "evaluate 2 at 2", "evaluated 2"),
    ]


def test_with_lag_training_goes_on_and_the_run_ends_after_its_evaluations():
    made = run(lag=1, config=evaluating(1))
    assert made.error is None
    begun, ended = made.events.index("evaluate 0 at 0"), made.events.index("evaluated 0")
    assert made.events.index("pin 0") < begun
    assert {"roll 0", "roll 1", "update"} & set(made.events[begun:ended])
    assert made.events.index("evaluated 1") < made.events.index("evaluate 2 at 2")
    assert made.events[-3:] == ["evaluated 2", "pin None", "finish"]


@pytest.mark.parametrize("lag", [0, 1])
def test_while_a_checkpoint_is_written_nothing_is_trained_and_with_lag_engines_go_on(lag):
    made = run(lag=lag, due=(1,), config=of_steps(3, schedule={"lag": lag}))
    begun, ended = (made.events.index(f"{what} 1") for what in ("checkpoint", "written"))
    meanwhile = made.events[begun + 1 : ended]
    assert meanwhile == (["roll 4", "roll 5"] if lag else [])
    assert made.records.books[0]["data"] == {"drawn": 2}  # as it was when the step had ended
    assert made.events.count("update") == 3 and made.events[-1] == "finish"
    spans = [span[:3] for step in made.timeline for span in step["spans"]]
    assert ["trainer", "checkpoint", 1] in spans


def test_after_a_signal_no_evaluation_is_begun():
    """It comes while the trainer waits for the evaluation before."""
    made = run(lag=1, config=evaluating(1), due=(), stops="evaluated 1")
    assert made.error is None and "evaluated 1" in made.events
    assert not [event for event in made.events if event.startswith("evaluate 2")]
    assert made.events.index("checkpoint 2") > made.events.index("evaluated 1")


def test_a_checkpoint_waits_for_the_evaluations_before_its_step():
    events = run(lag=1, config=evaluating(1)).events
    assert events.index("evaluated 1") < events.index("checkpoint 2")
    assert events.index("checkpoint 2") < events.index("evaluate 2 at 2")


@pytest.mark.parametrize("lag", [0, 1])
def test_evaluating_changes_nothing_that_is_trained(lag):
    plain, other = run(lag=lag), run(lag=lag, config=evaluating(lag))
    asked = plain.engines.asked  # versions and seeds, in turn
    assert other.engines.asked[: len(asked)] == asked
    for one, two in zip(plain.trainer.batches, other.trainer.batches, strict=True):
        assert [a.tolist() for a in one.advantages] == [a.tolist() for a in two.advantages]


def test_what_is_on_record_is_not_evaluated_again():
    made = run(config=evaluating(0), recorded={0, 1})
    assert [event for event in made.events if "evaluate " in event] == ["evaluate 2 at 2"]
