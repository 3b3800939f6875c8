"""Sessions end, and states of models are let go: nothing stays behind, nothing goes too soon."""

from __future__ import annotations

import asyncio

import pytest
from pretended_backend import PretendedBackend

from lora_moe_rl.service.bodies import SessionBody
from lora_moe_rl.service.requests import Reply, Requests, in_json
from lora_moe_rl.service.sessions import UNNAMED_KEPT, Model, Sampler, Session, Sessions


class Backend(PretendedBackend):
    """Of which `dead` samplers and models cannot be forgotten."""

    dead: tuple[str, ...] = ()

    async def forget(self, model: str) -> None:
        self.calls.append(("forget", model))
        if model in self.dead:
            raise KeyError(model)

    async def forget_sampler(self, sampler: str) -> None:
        await super().forget_sampler(sampler)
        if sampler in self.dead:
            raise KeyError(sampler)


def sessions() -> tuple[Sessions, Session, Model, Backend]:
    backend = Backend()
    made = Sessions(backend, Requests())
    session = made.create(SessionBody(sdk_version="0"))
    return made, session, made.add_model(session, 0), backend


def add(made: Sessions, session: Session, model: Model, number: int) -> Sampler:
    sampler = Sampler(f"{session.id}:sample:{number}", model=model.id)
    made.add_sampler(session, sampler)
    return sampler


async def test_a_new_state_stays_when_all_others_are_asked():
    made, session, model, backend = sessions()
    busy = [add(made, session, model, n) for n in range(UNNAMED_KEPT)]
    for one in busy:
        one.asks = 1
    new = [add(made, session, model, n) for n in (100, 101)]
    assert [*session.samplers.values()] == [*busy, new[1]]
    for one in busy:
        one.asks = 0
    last = add(made, session, model, 102)
    await asyncio.sleep(0.01)
    assert [*session.samplers.values()] == [*busy[2:], new[1], last]
    assert backend.named("forget_sampler") == [(one.id,) for one in (new[0], *busy[:2])]


async def test_a_state_that_is_made_while_its_session_ends_is_forgotten():
    made, session, model, backend = sessions()
    first = add(made, session, model, 0)
    publishing = asyncio.Event()

    async def save() -> Reply:
        await publishing.wait()
        return in_json({"sampler": add(made, session, model, 1).id})

    model.line.submit(0, "save_weights_for_sampler", save)
    await asyncio.sleep(0.01)
    made.end(session, "its client said success")
    await asyncio.sleep(0.01)
    assert not backend.named("forget")
    publishing.set()
    await asyncio.sleep(0.01)
    assert backend.named("forget_sampler") == [(first.id,), (f"{session.id}:sample:1",)]
    assert backend.named("forget") == [(model.id,)]


@pytest.mark.parametrize("dead", ["sample:0", "train:0"])
async def test_what_cannot_be_forgotten_keeps_nothing_else_here(dead):
    made, session, model, backend = sessions()
    backend.dead = (f"{session.id}:{dead}",)
    states = [add(made, session, model, n) for n in range(2)]
    other = made.add_model(session, 1)
    made.end(session, "its client said success")
    await asyncio.sleep(0.01)
    assert backend.named("forget_sampler") == [(one.id,) for one in states]
    assert backend.named("forget") == [(model.id,), (other.id,)]
