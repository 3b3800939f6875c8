"""The schedule and the ticket book, walked through thousands of interleavings: no ticket is lost,
trained twice, too old, or waits for ever."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_rl.config import ScheduleConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.tickets import State, Ticket, TicketBook


class Source:
    """Prompts numbered from 0, as PromptSource draws them."""

    def __init__(self, drawn=0):
        self.drawn = drawn

    def state_dict(self):
        return {"drawn": self.drawn}

    def next(self) -> Prompt:
        self.drawn += 1
        return Prompt(self.drawn - 1, "", [1])


def at_once(coroutine) -> object:
    """What a coroutine returns that has nothing to wait for. An event loop for each would take nine
    tenths of these tests' time."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def of(book: TicketBook, state: State) -> list[Ticket]:
    """All tickets that are in a state, found without what the book keeps of them."""
    return [ticket for ticket in book.tickets.values() if ticket.state is state]


class Life:
    """One life of a run: what a step of the event loop may do, in any order. `published`: the
    versions that went to the engines, which keep the newest lag + 2. Tickets of the numbers `slow`
    come after all others."""

    def __init__(self, schedule: Schedule, source: Source, done=(), newest=0, slow=frozenset()):
        self.slow = slow
        self.source, self.book, self.newest = source, TicketBook(schedule, done), newest
        self.published = [newest]
        asked = ScheduleConfig(lag=schedule.lag, stale=schedule.stale)
        self.max_age = asked.max_age * schedule.versions_per_step

    def feed(self, _) -> None:
        if self.book.schedule.may_admit(len(self.book.tickets)):
            drawn_at = self.source.state_dict()
            self.book.admit(self.source.next(), drawn_at)

    def claim(self, _) -> None:
        if waiting := of(self.book, State.WAITING):
            ticket = at_once(self.book.claim(lambda: self.newest))
            assert ticket is min(waiting, key=lambda ticket: ticket.number)

    def begin_all(self) -> None:
        """What a run does at once, whenever it can."""
        while self.book.schedule.may_admit(len(self.book.tickets)):
            self.feed(0)
        while of(self.book, State.WAITING):
            self.claim(0)

    def score(self, pick: int) -> None:
        if rolling := of(self.book, State.ROLLING):
            fast = [ticket for ticket in rolling if ticket.number not in self.slow]
            ticket = (fast or rolling)[pick % len(fast or rolling)]
            self.book.scored(ticket, Group(ticket.prompt, [], None, np.zeros(0)))

    def die(self, pick: int) -> None:
        if rolling := of(self.book, State.ROLLING):
            self.book.give_back(rolling[pick % len(rolling)])

    def drop(self, pick: int) -> None:
        if rolling := of(self.book, State.ROLLING):
            self.book.drop(rolling[pick % len(rolling)], "test")

    def train(self, skipped: int) -> list[int]:
        """The numbers of what is trained; `skipped` of its updates make no version."""
        if what := self.book.missing(self.newest):
            self._check_wait(what)
            return []
        return self._trained(at_once(self.book.next_step(self.newest)), skipped)

    def _trained(self, step: list[Ticket], skipped: int) -> list[int]:
        assert len(step) == self.book.schedule.groups_per_step
        for ticket in step:
            assert self.newest - ticket.version <= self.max_age
        made = self.book.schedule.versions_per_step
        self.newest += made if skipped < made else 0  # all or none (trainer/update.py)
        if self.newest != self.published[-1]:
            self.published.append(self.newest)
        slots = self.published[-(self.book.schedule.lag + 2) :]
        if not self.book.schedule.continued:  # whose requests are at the newest version
            for ticket in of(self.book, State.ROLLING):  # else the publish would wait for it
                assert ticket.version in slots
        self.book.trained(step)
        return [ticket.number for ticket in step]

    def _check_wait(self, what: str) -> None:
        """What the trainer waits for is named, and there."""
        if what == "scored groups":
            assert len(of(self.book, State.SCORED)) < self.book.schedule.groups_per_step
        else:
            assert what == "the oldest groups" and of(self.book, State.ROLLING)


ACTIONS = ("feed", "claim", "score", "train", "die", "drop")
# As a run goes: what can begin has begun, and most that happens is that samples come.
RUNNING = ("score", "score", "score", "train", "train", "score", "die", "drop")


def drawn(actions: tuple[str, ...], most=200) -> st.SearchStrategy:
    """One byte an action, which hypothesis draws faster than a list of pairs."""
    return st.binary(max_size=most).map(
        lambda drawn: [(actions[byte % len(actions)], byte // len(actions)) for byte in drawn]
    )


SCHEDULES = st.builds(
    Schedule,
    groups_per_step=st.integers(1, 4),
    lag=st.integers(0, 3),
    versions_per_step=st.integers(1, 2),
    stale=st.sampled_from(["wait", "train", "drop", "redraw"]),
    continued=st.booleans(),
)


def finish(life: Life) -> tuple[list[int], set[int]]:
    """Lets every task do all that it can, until ten steps were trained. Returns the numbers of what
    was trained, and of what was dropped."""
    trained, dropped, steps = [], set(), 0
    for _ in range(2000):
        life.begin_all()
        life.score(0)
        before = set(life.book.tickets)
        found = life.train(0)
        trained += found
        dropped |= before - set(life.book.tickets) - set(found)
        steps += bool(found)
        if steps == 10:
            return trained, dropped
    pytest.fail(f"it hangs: {life.book.waits}, {life.book.tickets}")


@settings(max_examples=300, deadline=None)
@given(schedule=SCHEDULES, lives=st.lists(drawn(ACTIONS), max_size=4))
def test_no_ticket_is_lost_or_trained_twice_whatever_happens(schedule, lives):
    """Each life ends at any moment, and the next goes on from the book as it was after its last
    trained step."""
    trained, dropped = [], set()
    saved, newest = {"data": {"drawn": 0}, "done": []}, 0
    for actions in lives:
        life = Life(schedule, Source(saved["data"]["drawn"]), saved["done"], newest)
        kept = list(trained), set(dropped)  # what the checkpoint knows
        for name, pick in actions:
            before = set(life.book.tickets)
            found = getattr(life, name)(pick) or []
            kept[0].extend(found)
            if name in ("drop", "train"):  # to train may drop what is too old
                kept[1].update(before - set(life.book.tickets) - set(found))
            assert len(life.book.tickets) <= schedule.width
            if found:  # a checkpoint after each step
                saved, newest = life.book.state_dict(life.source.state_dict()), life.newest
                trained, dropped = list(kept[0]), set(kept[1])
    # Finish: what is left is trained, and nothing below has been left out.
    life = Life(schedule, Source(saved["data"]["drawn"]), saved["done"], newest)
    more, too_old = finish(life)
    trained, dropped = trained + more, dropped | too_old
    assert len(trained) == len(set(trained)) and not set(trained) & dropped
    assert not set(range(max(trained))) - set(trained) - dropped - set(life.book.tickets)


@settings(max_examples=600, deadline=None)
@given(schedule=SCHEDULES, actions=drawn(RUNNING, 60), slow=st.frozensets(st.integers(0, 20)))
def test_whatever_the_order_steps_go_on_within_the_bound_and_no_publish_waits(
    schedule, actions, slow
):
    """Some samples are long, engines die, updates are skipped: see the assertions of Life."""
    life = Life(schedule, Source(), slow=slow)
    for name, pick in actions:
        life.begin_all()
        getattr(life, name)(pick)
        if schedule.stale == "wait":
            assert not life.book.stale
    finish(life)


@settings(max_examples=300, deadline=None)
@given(schedule=SCHEDULES, actions=drawn(ACTIONS))
def test_something_can_always_be_done(schedule, actions):
    """No deadlock: from any state, letting every task do what it can leads to further steps."""
    life = Life(schedule, Source())
    for name, pick in actions:
        getattr(life, name)(pick)
    finish(life)


def test_a_continued_ticket_is_as_old_as_its_oldest_token():
    """Its environment took ten versions to begin; then two more came while it was sampled."""
    for continued, age in ((True, 2), (False, 12)):
        book = TicketBook(Schedule(1, lag=1, stale="redraw", continued=continued))
        book.admit(Prompt(0, "", [1], {}), {})
        ticket = at_once(book.claim(lambda: 0))
        book.asks(ticket, 10)
        assert 12 - ticket.version == age
        sampled = Segment.sampled([7, 8], np.zeros(2), 11)
        sample = Sample((Segment.given("user", [1]), sampled), "stop", "")
        book.scored(ticket, Group(ticket.prompt, [sample], None, np.zeros(1, np.float32)))
        assert 12 - ticket.version == (1 if continued else 12)
        assert bool(book.missing(12)) != continued  # too old, and sampled once more


@pytest.mark.parametrize(
    ("stale", "steps", "left"),
    [
        ("train", [[1], [2], [0]], [3]),
        ("drop", [[1], [2], [3]], []),
        ("redraw", [[1], [2], [3]], [0]),
    ],
)
def test_what_becomes_of_a_group_that_is_too_old(stale, steps, left):
    """Lag 1, one group a step: ticket 0 is sampled under version 0 and comes when 2 is served."""
    life = Life(Schedule(1, lag=1, stale=stale), Source())
    for _ in range(2):
        life.feed(0)
        life.claim(0)
    found = []
    for _ in range(2):
        life.score(1)
        found.append(life.train(0))
        life.feed(0)
        life.claim(0)
    life.score(0)
    life.score(0)
    found.append(life.train(0))
    assert found == steps and list(life.book.tickets) == left
    assert life.book.stale == 1 and life.book.dropped == ({"too old": 1} if stale == "drop" else {})
    if stale == "redraw":
        assert life.book.tickets[0].state is State.WAITING and life.book.tickets[0].group is None


def test_lag_0_takes_prompts_in_order_a_step_at_a_time():
    life = Life(Schedule(2), Source())
    steps = []
    for _ in range(20):
        for name in ("feed", "claim", "score"):
            getattr(life, name)(1)
        if step := life.train(0):
            assert not life.book.tickets
            steps.append(step)
    assert steps[:3] == [[0, 1], [2, 3], [4, 5]]


def test_a_ticket_that_is_given_back_no_longer_holds_up_the_step():
    async def scene():
        book = TicketBook(Schedule(1, lag=1))
        for number in range(2):
            book.admit(Prompt(number, "", [1]), {})
        first, second = await book.claim(lambda: 0), await book.claim(lambda: 0)
        assert first and second
        book.scored(first, Group(first.prompt, [], None, np.zeros(0)))
        step = asyncio.create_task(book.next_step(1))  # the second would be 2 old after it
        await asyncio.sleep(0)
        assert not step.done()
        book.give_back(second)
        assert await asyncio.wait_for(step, 1) == [first]

    asyncio.run(scene())


def test_what_was_trained_before_an_older_ticket_is_not_trained_again_by_the_next_life():
    schedule = Schedule(1, lag=1)
    life = Life(schedule, Source())
    for name, pick in (("feed", 0), ("feed", 0), ("claim", 0), ("claim", 0), ("score", 1)):
        getattr(life, name)(pick)
    assert life.train(0) == [1]
    saved = life.book.state_dict(life.source.state_dict())
    assert saved == {"data": {"drawn": 0}, "done": [1]}
    life = Life(schedule, Source(saved["data"]["drawn"]), saved["done"], life.newest)
    trained = []
    for _ in range(8):
        for name in ("feed", "claim", "score"):
            getattr(life, name)(0)
        trained += life.train(0)
    assert trained[:4] == [0, 2, 3, 4] and not life.book.done
