"""Tasks that wait for the ticket book: who is woken, and by what."""

import asyncio

import numpy as np

from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.tickets import State, TicketBook


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
