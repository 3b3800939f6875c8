"""What is made of what can be seen of a run after a fault."""

from __future__ import annotations

from lora_moe_rl.chaos.judge import ENDED, NEVER, STUCK, UNNOTICED, Judge, Sight
from lora_moe_rl.chaos.kinds import HEALED, RESUMED, STOPPED
from lora_moe_rl.telemetry import names

RANKS = "trainer-1 failed (it died): all trainer ranks are ended\nand started anew, restart 1"
AGAIN = "the run's process ended (signal SIGKILL); it is started again, from the checkpoint of"


def sight(now: float, said: str, steps: int, code: int | None = None, **last: float) -> Sight:
    """A run with so many steps; `last`: metrics of the newest, with _ for /."""
    records = [{"step": step} for step in range(1, steps + 1)]
    if records:
        records[-1] |= {key.replace("_", "/", 1): value for key, value in last.items()}
    return Sight(now, said, records, code)


def judged(kind: str, *sights: Sight, happened: bool = True) -> tuple[str | None, float | None]:
    """The outcome and the seconds, of a run that is looked at so; the fault is at second 0."""
    judge = Judge(kind, sight(0, "", 5), patience_s=100)
    if happened:
        judge.has_happened(0)
    for one in sights:
        outcome = judge.look(one)
        if outcome is not None:
            assert one is sights[-1]
            return outcome, judge.seconds
    return None, judge.seconds


def test_a_step_after_what_the_run_says_is_a_good_one():
    assert judged("rank.kill", sight(1, "", 6), sight(2, RANKS, 6)) == (None, None)
    steps = sight(1, "", 6), sight(2, RANKS, 6), sight(9, RANKS, 7)
    assert judged("rank.kill", *steps) == (HEALED, 9)


def test_steps_before_anything_is_noticed_are_no_sign_of_it():
    steps = [sight(now, "", 5 + now) for now in range(1, 20)]
    assert judged("engine.kill", *steps) == (None, None)
    assert judged("engine.kill", *steps, sight(101, "", 30)) == (UNNOTICED, None)


def test_a_run_that_says_something_and_does_nothing_is_stuck():
    assert judged("rank.hang", sight(2, RANKS, 5), sight(101, RANKS, 5)) == (STUCK, None)


def test_a_fault_that_never_comes_about_is_none_that_was_healed():
    found = judged("nan.grad", sight(2, "", 6), sight(101, "", 30), happened=False)
    assert found == (NEVER, None)


def test_a_run_that_goes_on_from_a_checkpoint_takes_steps_off_the_record_first():
    sights = sight(1, AGAIN, 5), sight(20, AGAIN, 3), sight(25, AGAIN, 4)
    assert judged("controller.kill", *sights[:2]) == (None, None)
    assert judged("controller.kill", *sights) == (RESUMED, 25)


def test_ranks_for_which_the_whole_run_was_started_again_were_not_healed():
    said = RANKS + AGAIN
    assert judged("rank.kill", sight(1, said, 5), sight(9, said, 6)) == (RESUMED, 9)


def test_what_is_counted_in_a_step_is_noticed_there_and_the_next_is_good():
    first, second = sight(1, "", 6, reward_failed=8), sight(2, "", 7)
    assert names.REWARDS_FAILED in first.records[-1]
    assert judged("reward.hang", first, second) == (HEALED, 2)
    assert judged("reward.hang", sight(1, "", 6, reward_failed=0), second) == (None, None)


def test_what_was_counted_before_the_fault_is_another():
    judge = Judge("reward.hang", sight(0, "", 5, reward_failed=8), 100)
    assert judge.look(sight(1, "", 5, reward_failed=8)) is None
    assert not judge.noticed


def test_a_stop_is_one_by_name_only_with_the_error_of_the_fault():
    named = "error: trainer rank 0: routes of layers 0 to 3\nare corrupt: their xxh3-64 is"
    assert judged("route.flip", sight(1, named, 5, code=1)) == (STOPPED, None)
    assert judged("route.flip", sight(1, "error: no memory", 5, code=1)) == (ENDED, None)
    assert judged("route.flip", sight(1, named, 5, code=0)) == (ENDED, None)
    assert judged("rank.kill", sight(1, RANKS, 5, code=75)) == (ENDED, None)


def test_after_a_stop_the_seconds_are_those_to_a_step_of_the_run_that_goes_on():
    judge = Judge("shm.corrupt", sight(0, "", 5), 100)
    judge.has_happened(1)
    said = "adapter version 5: the checksum of layers.0.q_proj.A from trainer rank 0 differs"
    assert judge.look(sight(2, said, 5, code=1)) == STOPPED
    assert not judge.goes_on(sight(3, "", 5)) and not judge.goes_on(sight(4, "", 3))
    assert judge.goes_on(sight(31, "", 4)) and judge.seconds == 30


def test_a_full_disk_counts_from_when_a_write_is_refused():
    said = "warning: cannot write a checkpoint: File too large"
    sights = sight(90, "", 8), sight(95, said, 8), sight(99, said, 9)
    assert judged("disk.full", *sights) == (HEALED, 4)
