"""Who may go ahead of whom, of tickets made by hand; a run's whole life is in test_tickets.py."""

import numpy as np
import pytest

from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.run.schedule import Schedule, seed_of
from lora_moe_rl.run.tickets import Ticket


def a_ticket(number: int, version: int) -> Ticket:
    return Ticket(Prompt(number, "", [1]), {}, version=version)


def test_a_step_is_waited_with_when_more_would_be_left_than_can_be_trained_in_time():
    """Two groups a step, lag 2. Four of version 0 roll on while two of version 1 are there: after
    their step one step is left for what is of version 0, which has room for two."""
    schedule = Schedule(2, lag=2)
    scored, rolling = [a_ticket(6, 1), a_ticket(7, 1)], [a_ticket(n, 0) for n in (2, 3, 4, 5)]
    assert schedule.next_step(scored, rolling, newest=1) == []
    assert schedule.missing(scored, rolling, newest=1) == "the oldest groups"
    assert schedule.next_step(scored, rolling[:2], newest=1) == scored
    assert Schedule(2, lag=2, stale="drop").next_step(scored, rolling, newest=1) == scored


def test_a_rolling_ticket_that_is_too_old_is_waited_for_whatever_becomes_of_it():
    """It holds the slot that the next version goes to."""
    schedule = Schedule(1, lag=1, stale="drop")
    scored, rolling = [a_ticket(3, 2)], [a_ticket(0, 0)]
    assert schedule.next_step([a_ticket(2, 1)], rolling, newest=1)
    assert schedule.missing(scored, rolling, newest=2) == "the oldest groups"


@pytest.mark.parametrize(
    ("stale", "missing"),
    [("wait", "the oldest groups"), ("train", "the oldest groups"), ("drop", ""), ("redraw", "")],
)
def test_one_that_is_continued_holds_no_slot_and_is_waited_for_only_to_be_trained(stale, missing):
    schedule = Schedule(1, lag=1, stale=stale, continued=True)
    assert schedule.missing([a_ticket(3, 2)], [a_ticket(0, 0)], newest=2) == missing


def test_the_seed_is_of_the_number_alone():
    """The same as before there were tickets: (run seed, step), then the place in the step."""
    step = int(np.random.SeedSequence([5, 3]).generate_state(1)[0])
    place = int(np.random.SeedSequence([step, 1]).generate_state(1)[0])
    assert seed_of(5, number=9, groups_per_step=4) == place
    assert len({seed_of(0, number, 16) for number in range(500)}) == 500


def test_an_age_is_counted_in_steps_of_several_versions():
    """Two optimizer steps a step: with lag 1 a ticket of the version before is two versions old."""
    schedule = Schedule(1, lag=1, versions_per_step=2)
    ready, rolling = Ticket(Prompt(0, "", [1]), {}), Ticket(Prompt(1, "", [1]), {})
    ready.version, rolling.version = 4, 4
    assert schedule.next_step([ready], [rolling], newest=4) == [ready]
    assert schedule.next_step([ready], [rolling], newest=6) == []  # else it would be 4 old
    assert not schedule.is_stale(ready, newest=6) and schedule.is_stale(ready, newest=7)
