"""The schedule and the ticket book, walked through thousands of interleavings: no ticket is lost,
trained twice, too old, or waits for ever."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.run.schedule import Schedule, seed_of
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
    """One life of a run: what a step of the event loop may do, in any order."""

    def __init__(self, schedule: Schedule, source: Source, done=(), newest=0):
        self.source, self.book, self.newest = source, TicketBook(schedule, done), newest

    def feed(self, _) -> None:
        if self.book.schedule.may_admit(len(self.book.tickets)):
            drawn_at = self.source.state_dict()
            self.book.admit(self.source.next(), drawn_at)

    def claim(self, _) -> None:
        if waiting := of(self.book, State.WAITING):
            ticket = at_once(self.book.claim(lambda: self.newest))
            assert ticket is min(waiting, key=lambda ticket: ticket.number)

    def score(self, pick: int) -> None:
        if rolling := of(self.book, State.ROLLING):
            ticket = rolling[pick % len(rolling)]
            self.book.scored(ticket, Group(ticket.prompt, [], None, np.zeros(0)))

    def die(self, pick: int) -> None:
        if rolling := of(self.book, State.ROLLING):
            self.book.give_back(rolling[pick % len(rolling)])

    def drop(self, pick: int) -> None:
        if rolling := of(self.book, State.ROLLING):
            self.book.drop(rolling[pick % len(rolling)], "test")

    def train(self, _) -> list[int]:
        schedule, book = self.book.schedule, self.book
        rolling = min((ticket.version for ticket in of(book, State.ROLLING)), default=None)
        step = schedule.next_step(of(book, State.SCORED), rolling, self.newest)
        for ticket in step:
            assert not schedule.is_stale(ticket, self.newest)
        if step:
            assert at_once(book.next_step(self.newest)) == step
            self.newest += 1
            book.trained(step)
        else:
            with pytest.raises(RuntimeError, match="no running event loop"):  # it would wait
                at_once(book.next_step(self.newest))
        return [ticket.number for ticket in step]


ACTIONS = ("feed", "claim", "score", "train", "die", "drop")
# One byte an action, which hypothesis draws faster than a list of pairs.
STEPS = st.binary(max_size=200).map(
    lambda drawn: [(ACTIONS[byte % len(ACTIONS)], byte // len(ACTIONS)) for byte in drawn]
)


@settings(max_examples=300, deadline=None)
@given(per_step=st.integers(1, 4), lag=st.integers(0, 3), lives=st.lists(STEPS, max_size=4))
def test_no_ticket_is_lost_or_trained_twice_whatever_happens(per_step, lag, lives):
    """Each life ends at any moment, and the next goes on from the book as it was after its last
    trained step."""
    schedule = Schedule(per_step, lag)
    trained, dropped = [], set()
    saved, newest = {"data": {"drawn": 0}, "done": []}, 0
    for actions in lives:
        life = Life(schedule, Source(saved["data"]["drawn"]), saved["done"], newest)
        kept = list(trained), set(dropped)  # what the checkpoint knows
        for name, pick in actions:
            before = set(life.book.tickets)
            found = getattr(life, name)(pick) or []
            kept[0].extend(found)
            if name == "drop":
                kept[1].update(before - set(life.book.tickets))
            assert len(life.book.tickets) <= schedule.width
            if found:  # a checkpoint after each step
                saved, newest = life.book.state_dict(life.source.state_dict()), life.newest
                trained, dropped = list(kept[0]), set(kept[1])
    assert len(trained) == len(set(trained)) and not set(trained) & dropped
    # Finish: what is left is trained in order, and nothing below has been left out.
    life = Life(schedule, Source(saved["data"]["drawn"]), saved["done"], newest)
    for _ in range(400):
        for name in ("feed", "claim", "score"):
            getattr(life, name)(0)
        trained += life.train(0)
    assert len(trained) == len(set(trained)) and not set(trained) & dropped
    top = max(trained)
    lost = set(range(top)) - set(trained) - dropped - set(life.book.tickets)
    assert not lost


@settings(max_examples=300, deadline=None)
@given(per_step=st.integers(1, 4), lag=st.integers(0, 3), actions=STEPS)
def test_something_can_always_be_done(per_step, lag, actions):
    """No deadlock: from any state, letting every task do what it can leads to another step."""
    life = Life(Schedule(per_step, lag), Source())
    for name, pick in actions:
        getattr(life, name)(pick)
    for _ in range(50):
        for name in ("feed", "claim", "score"):
            getattr(life, name)(0)
        if life.train(0):
            return
    pytest.fail(f"nothing was trained: {life.book.tickets}")


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


def test_the_seed_is_of_the_number_alone():
    """The same as before there were tickets: (run seed, step), then the place in the step."""
    step = int(np.random.SeedSequence([5, 3]).generate_state(1)[0])
    place = int(np.random.SeedSequence([step, 1]).generate_state(1)[0])
    assert seed_of(5, number=9, groups_per_step=4) == place
    assert len({seed_of(0, number, 16) for number in range(500)}) == 500


def test_those_who_wait_are_let_go_and_the_book_says_what_they_wait_for():
    async def scene():
        book = TicketBook(Schedule(1))
        claim = asyncio.create_task(book.claim(lambda: 7))
        step = asyncio.create_task(book.next_step(7))
        await asyncio.sleep(0)
        assert book.waits == {"a ticket to roll": 1, "scored groups": 1}
        book.admit(Prompt(0, "", [1]), {})
        ticket = await claim
        assert ticket.version == 7 and ticket.state is State.ROLLING
        full = asyncio.create_task(book.slot())
        book.scored(ticket, Group(ticket.prompt, [], None, np.zeros(0)))
        assert await step == [ticket]
        await asyncio.sleep(0)
        assert not full.done()
        book.trained([ticket])
        assert await full is True
        last = asyncio.create_task(book.claim(lambda: 8))
        await asyncio.sleep(0)
        book.close()
        assert await last is None and await book.slot() is False

    asyncio.run(scene())


def test_one_more_ticket_wakes_one_of_those_who_wait_and_nobody_else():
    """What a step costs grows with its tickets, not with their square: each looks once more."""

    async def scene(num_tickets: int) -> int:
        looks = 0

        class Counted(TicketBook):
            async def _until(self, condition, what):
                def look():
                    nonlocal looks
                    looks += 1
                    return condition()

                await super()._until(look, what)

        book = Counted(Schedule(num_tickets))

        async def roll():
            while ticket := await book.claim(lambda: 0):
                for _ in range(ticket.number):  # one after the other
                    await asyncio.sleep(0)
                book.scored(ticket, Group(ticket.prompt, [], None, np.zeros(0)))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_tickets):
                tasks.create_task(roll())
            for number in range(num_tickets):
                await book.slot()
                book.admit(Prompt(number, "", [1]), {})
            step = await book.next_step(0)
            assert step is not None and len(step) == num_tickets
            book.close()
        return looks

    # Each ticket: a slot, a claim that sleeps first, another one once it is scored; the step.
    assert asyncio.run(scene(40)) <= 6 * 40


def test_whoever_is_cancelled_after_it_was_woken_wakes_another():
    async def scene():
        book = TicketBook(Schedule(2))
        first, second = (asyncio.create_task(book.claim(lambda: 0)) for _ in range(2))
        await asyncio.sleep(0)
        book.admit(Prompt(0, "", [1]), {})
        first.cancel()
        ticket = await asyncio.wait_for(second, 1)
        assert ticket is not None and ticket.number == 0

    asyncio.run(scene())


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


def test_an_age_is_counted_in_steps_of_several_versions():
    """Two optimizer steps a step: with lag 1 a ticket of the version before is two versions old."""
    schedule = Schedule(1, lag=1, versions_per_step=2)
    ready, rolling = Ticket(Prompt(0, "", [1]), {}), Ticket(Prompt(1, "", [1]), {})
    ready.version, rolling.version = 4, 4
    assert schedule.next_step([ready], rolling.version, newest=4) == [ready]
    assert schedule.next_step([ready], rolling.version, newest=6) == []  # else it would be 4 old
    assert not schedule.is_stale(ready, newest=6) and schedule.is_stale(ready, newest=7)
