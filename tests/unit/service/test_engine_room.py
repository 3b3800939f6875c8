"""Turns at the ranks, and who is served what, when clients leave and engines die in between."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import EngineLost, NotServed, RefitError, ServiceError
from lora_moe_rl.service import engine_room
from lora_moe_rl.service.backend import Adam, Ask, Facts, Lora
from lora_moe_rl.service.engine_room import EngineRoom
from lora_moe_rl.service.saved import Read
from lora_moe_rl.service.waiting import KEPT

ASK = Ask([1, 2], 1, 3)
SLOTS = 2


class Ranks:
    """Models are numbers, which a step adds one to. Raises AssertionError where real ranks would
    mix models: what is there has to be the model that was selected last."""

    def __init__(self):
        self.of: dict[str, float] = {}
        self.here: str | None = None
        self.sent: dict[int, float] = {}  # by version
        self.began, self.may_end = threading.Event(), threading.Event()  # a load
        self.may_end.set()

    async def create(self, model, seed, ranks, factor):
        self.of[model], self.here = seed, model

    async def select(self, model):
        await asyncio.sleep(0)
        assert model in self.of, f"ranks do not know {model}"
        self.here = model

    async def keep(self, model, copy):
        await self.select(model)
        self.of[copy] = self.of[model]

    async def forget(self, model):
        self.of.pop(model, None)

    async def step(self, model, *how):
        await self.select(model)
        self.of[model] += 1
        return {}

    def load(self, path, meta, model, factor, optimizer):
        self.here = None
        self.began.set()
        self.may_end.wait(10)
        assert self.here is None, f"{self.here} came between a checkpoint's parts"
        self.of[model], self.here = meta["value"], model

    async def send_as(self, version):
        self.sent[version] = self.of[self.here]
        return [self.sent[version]]


class Engines:
    """One engine, on devices of its own."""

    phase = None

    def __init__(self):
        self.prove = None
        self.returning: dict[int, asyncio.Task] = {}
        self.empty: set[int] = set()
        self.published = None
        self.slots: dict[int, float] = {}

    async def all_back(self):
        while self.returning:
            index, task = next(iter(self.returning.items()))
            await asyncio.wait([task])
            del self.returning[index]
            task.result()

    def overwrite(self):
        self.published = None

    async def dies(self):
        """And comes back, with what was published last."""
        await asyncio.sleep(0.01)
        if self.published is not None:
            version, parts = self.published
            self.slots = {version: parts[0]}
            await self.prove(0, version)
        else:
            self.slots = {}


class Publisher:
    """As run/publisher.py: what engines have is compared with what ranks hold."""

    def __init__(self, ranks: Ranks, engines: Engines):
        self.ranks, self.engines = ranks, engines
        self.dies_over: int | None = None
        self.wrong: set[int] = set()  # versions that an engine which came back serves wrongly

    async def start(self):
        await self.publish(0, await self.ranks.send_as(0), ())

    async def publish(self, version, parts, samples):
        await self.engines.all_back()
        self.engines.published = version, parts
        self.engines.slots[version] = parts[0]
        while len(self.engines.slots) > SLOTS:
            del self.engines.slots[min(self.engines.slots)]
        await asyncio.sleep(0)
        if version == self.dies_over:
            await asyncio.gather(self.engines.dies())
        self._prove(version)

    async def prove_returned(self, index, version):
        await asyncio.sleep(0)
        if version in self.wrong:
            raise RefitError(f"adapter version {version} is not served")
        self._prove(version)

    def _prove(self, version):
        ranks = self.ranks
        assert self.engines.slots[version] == ranks.of[ranks.here], "the proof is of another"


class Samplers:
    def __init__(self, engines: Engines):
        self.engines, self.fails = engines, None
        self.hold: asyncio.Event | None = None

    def check(self, ask):
        pass

    async def sample(self, version, ask, of=None):
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        if version not in self.engines.slots:
            raise NotServed(f"no {version}", [])
        if self.hold is not None:
            await self.hold.wait()
        return self.engines.slots[version]  # KeyError: another version is in its slot


class Places:
    config = RunConfig(refit={"slots": SLOTS})

    def check(self, lora): ...
    def ranks(self, lora):
        return {}

    def factor(self, lora):
        return 1.0


@pytest.fixture
def room(monkeypatch):
    """`deaths`: what has ended the service. Saved states are files that hold a number."""
    ranks, engines = Ranks(), Engines()
    publisher, facts = Publisher(ranks, engines), Facts("base", "there", 10, 8)
    parts = facts, Places(), {}, ranks, engines, publisher, Samplers(engines), None
    made = EngineRoom(*parts)
    made.deaths = []
    made.turn.on_death = made.deaths.append

    def read(directory: Path, places, base):
        value = (directory / "value").read_text()
        return Read(Lora(8), directory, {"value": float(value)}, value)

    monkeypatch.setattr(engine_room, "saved", SimpleNamespace(read=read))
    return made


def saved(folder: Path, value: float) -> Path:
    folder.mkdir()
    (folder / "value").write_text(str(value))
    return folder


async def begun(room: EngineRoom, *models: int) -> None:
    """With models that are called as their numbers are."""
    await room.start()
    for number in models:
        await room.create(str(number), Lora(8, number))


def run(work) -> None:
    async def within():
        await asyncio.wait_for(work, 10)

    asyncio.run(within())


def test_an_engine_that_dies_over_a_versions_proof_is_proven_by_who_publishes(room):
    """Who has the ranks already: they would be waited for without end."""

    async def work():
        await begun(room, 10)
        room.publisher.dies_over = 1
        await room.publish("10", "s")
        assert await room.sample("s", ASK) == 10
        room.publisher.dies_over = None
        await room.step("10", Adam(1))
        await room.publish("10", "t")
        assert await room.sample("t", ASK) == 11
        assert not room.deaths

    run(work())


def test_an_engine_that_comes_back_before_a_version_is_sent_is_proven_first(room, tmp_path):
    """A checkpoint is read for long enough that an engine dies and is back meanwhile."""

    async def work():
        await begun(room, 10)
        await room.publish("10", "s")
        room.ranks.may_end.clear()
        publishing = asyncio.create_task(
            room.publish_saved(saved(tmp_path / "a", 7), "10", "named")
        )
        await asyncio.to_thread(room.ranks.began.wait)
        room.engines.returning[0] = asyncio.create_task(room.engines.dies())
        await asyncio.sleep(0.05)
        room.ranks.may_end.set()
        await publishing
        assert await room.sample("named", ASK) == 7
        assert await room.sample("s", ASK) == 10
        assert not room.deaths

    run(work())


def test_a_sample_that_is_given_up_does_not_end_what_it_had_published(room, tmp_path):
    """Others wait for the ranks, which a half-read checkpoint would be on."""

    async def work():
        await begun(room, 10)
        await room.publish_saved(saved(tmp_path / "a", 7), "10", "named")
        for number in range(KEPT):
            await room.publish("10", f"s{number}")
        room.ranks.began.clear()
        room.ranks.may_end.clear()
        asked = asyncio.create_task(room.sample("named", ASK))
        await asyncio.to_thread(room.ranks.began.wait)
        asked.cancel()
        stepping = asyncio.create_task(room.step("10", Adam(1)))
        await asyncio.sleep(0.05)
        assert not stepping.done(), "the ranks are half read"
        room.ranks.may_end.set()
        await stepping
        assert room.ranks.of["10"] == 11 and room.ranks.of["named"] == 7
        assert await room.sample("named", ASK) == 7

    run(work())


def test_an_engine_that_comes_back_with_something_else_ends_the_service(room):
    async def work():
        await begun(room, 10)
        await room.publish("10", "s")
        room.publisher.wrong.add(1)
        room.engines.returning[0] = asyncio.create_task(room.engines.dies())
        with pytest.raises(RefitError):
            await room.engines.all_back()
        assert [str(one) for one in room.deaths] == ["adapter version 1 is not served"]
        assert room.engines.empty == {0}, "clients get what is not proven"

    run(work())


def test_an_engine_that_is_lost_for_good_ends_the_service(room):
    async def work():
        await begun(room, 10)
        await room.publish("10", "s")
        lost = room.samplers.fails = EngineLost("engine-0", "died", "")
        for sampler in ("s", None):
            with pytest.raises(EngineLost):
                await room.sample(sampler, ASK)
        assert room.deaths == [lost, lost]

    run(work())


def test_states_on_the_disk_leave_before_those_that_are_nowhere_else(room, tmp_path):
    async def work():
        await begun(room, 10)
        await room.publish("10", "mine")
        for number in range(KEPT + 4):
            await room.publish_saved(saved(tmp_path / str(number), number), "10", f"n{number}")
        assert await room.sample("mine", ASK) == 10
        for number in (0, KEPT):
            assert await room.sample(f"n{number}", ASK) == number
        assert len(room.ranks.of) == KEPT + 3, "more wait than there may"

    run(work())


def test_a_state_that_was_written_over_is_not_served_as_what_it_was(room, tmp_path):
    async def work():
        await begun(room, 10)
        directory = saved(tmp_path / "a", 7)
        await room.publish_saved(directory, "10", "named")
        (directory / "value").write_text("8.0")
        assert await room.sample("named", ASK) == 7
        for number in range(KEPT + 1):
            await room.publish("10", f"s{number}")
        with pytest.raises(ServiceError, match="a was written over since sampler named"):
            await room.sample("named", ASK)
        await room.publish_saved(directory, "10", "named again")
        assert await room.sample("named again", ASK) == 8

    run(work())


def test_of_states_that_are_nowhere_else_the_one_goes_that_was_not_asked_for_longest(room):
    async def work():
        await begun(room, 10)
        for number in range(KEPT):
            await room.publish("10", f"s{number}")
        assert await room.sample("s0", ASK) == 10
        await room.publish("10", "one more")
        await room.publish("10", "and another")
        assert await room.sample("s0", ASK) == 10
        with pytest.raises(ServiceError, match=f"no longer here: {KEPT} newer ones"):
            await room.sample("s1", ASK)

    run(work())


def test_what_was_published_last_can_always_be_proven_again(room):
    """It was served again just now, and waits longest; the next one is refused by an engine."""

    async def work():
        await begun(room, 10)
        for number in range(KEPT):
            await room.publish("10", f"s{number}")
        await room.sample("s0", ASK)
        room.waiting.order.sort(key=lambda one: one != "s0")

        async def refused(*_):
            raise RefitError("an engine refuses it")

        room.publisher.publish = refused
        with pytest.raises(RefitError, match="refuses"):
            await room.publish("10", "one more")
        assert room.newest == "s0" and "s0" in room.ranks.of

    run(work())


def test_while_all_slots_are_read_others_train_and_the_next_state_waits(room):
    async def work():
        await begun(room, 10, 20)
        for sampler in ("a", "b"):
            await room.publish("10", sampler)
        room.samplers.hold = asyncio.Event()
        asked = [asyncio.create_task(room.sample(one, ASK)) for one in ("a", "a", "b")]
        await asyncio.sleep(0.01)
        publishing = asyncio.create_task(room.publish("10", "c"))
        await room.step("20", Adam(1))
        assert room.ranks.of["20"] == 21 and not publishing.done()
        asked[0].cancel()
        await asyncio.sleep(0.01)
        assert not publishing.done(), "a's slot is read once more"
        room.samplers.hold.set()
        assert await asked[1] == await asked[2] == 10
        await publishing
        assert [one for one in "abc" if one in room.slots.served] == ["b", "c"]
        assert not room.deaths

    run(work())


def test_a_state_keeps_its_slot_as_long_as_an_engine_does(room):
    """Whoever else is gone: it is not published once more, nor taken for served when it is not."""

    async def work():
        await begun(room, 10)
        for sampler in ("a", "b"):
            await room.publish("10", sampler)
        await room.forget_sampler("b")
        await room.publish("10", "c")
        assert room.slots.served == {"c": 3} and set(room.engines.slots) == {2, 3}
        assert await room.sample("a", ASK) == 10
        assert room.slots.served == {"c": 3, "a": 4}

    run(work())
