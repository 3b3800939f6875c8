"""Ranks and engines on the same devices: whoever asks for them has them in the end, and never both
at once."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import Phase as Part
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_rl.cluster.taking_turns import TakingTurns
from lora_moe_rl.cluster.turns import Act, Phase
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import EngineLost
from lora_moe_rl.service.turn import Turn

SHARED = RunConfig(placement={"mode": "colocated"})


class Engines(TakingTurns):
    """One, whose actor nobody asks; all else of it is real."""

    def __init__(self, phase: Phase | None = Phase.ROLLOUT):
        self.config, self.phase = SHARED, phase
        self.requests_begin = asyncio.Event()
        self.requests_begin.set()
        self.rolling, self.returning, self.published = [0], {}, "newest"
        self._way_given = {}
        self.asked: Counter[str] = Counter()

    async def _of_all(self, method, *args):
        self.asked[method] += 1
        await asyncio.sleep(0)
        return [0.0]

    def overwrite(self):
        self.published = None


class Service:
    def __init__(self, phase: Phase | None = Phase.ROLLOUT):
        self.engines = Engines(phase)
        self.turn = Turn(self.engines, self._come_back)
        self.done: list[str] = []

    async def _come_back(self):
        await self.engines.come_back()
        self.engines.published = "newest"
        self.engines.go_on()

    async def _begin(self):
        while not self.engines.requests_begin.is_set():
            await self.engines.requests_begin.wait()
        self.engines.take(Act.SAMPLE)

    async def sample(self):
        with self.turn.asking():
            await self._begin()
            self.engines.rolling[0] += 1
            await asyncio.sleep(0.001)
            assert self.engines.phase in (None, Phase.ROLLOUT), "its cache has gone"
            self.engines.rolling[0] -= 1
        self.done.append("sample")

    async def forward(self):
        async with self.turn.computing():
            apart = self.engines.phase is None
            assert apart or (self.engines.phase is Phase.TRAIN and self.engines.quiet)
            await asyncio.sleep(0.001)
        self.done.append("forward")

    async def publish(self):
        async with self.turn.refitting():
            assert self.engines.published is None or self.engines.phase is None
            await self.engines.slots_back()
            await self._come_back()
        self.done.append("publish")

    async def step(self):
        async with self.turn.alone():
            await asyncio.sleep(0)
        self.done.append("step")

    async def death(self):
        """Of an engine that is asked; it comes back, and is proven by the ranks."""
        with self.turn.asking():
            await self._begin()

            async def back():
                await asyncio.sleep(0.002)
                if self.engines.published:
                    async with self.turn.alone():
                        self.engines.take(Act.SCORE)

            if 0 not in self.engines.returning:
                self.engines.returning[0] = asyncio.create_task(back())
        self.done.append("death")


WORK = st.lists(
    st.tuples(
        st.sampled_from(["sample", "forward", "publish", "step", "death"]),
        st.sampled_from([0, 0.001, 0.003]),
    ),
    max_size=12,
)


@settings(phases=(Part.explicit, Part.generate))  # one that waits for ever is not tried again
@given(WORK)
def test_everything_that_is_asked_for_is_done(asked):
    async def all_of_it():
        service = Service()
        tasks = []
        for what, pause in asked:
            tasks.append(asyncio.create_task(getattr(service, what)()))
            await asyncio.sleep(pause)
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert Counter(service.done) == Counter(what for what, _ in asked)

    asyncio.run(all_of_it())


def test_who_has_the_devices_keeps_them_until_others_ask():
    async def one_after_the_other():
        service = Service()
        for what in ("forward", "step", "forward", "sample", "sample", "forward"):
            await getattr(service, what)()
        return service.engines

    engines = asyncio.run(one_after_the_other())
    assert engines.asked == {"give_way": 2, "wake": 1} and engines.phase is Phase.TRAIN


def test_who_gives_up_waiting_for_the_devices_stops_no_requests():
    async def given_up():
        service = Service()
        sampling = asyncio.create_task(service.sample())
        await asyncio.sleep(0)
        computing = asyncio.create_task(service.forward())
        await asyncio.sleep(0.0005)
        assert not service.engines.requests_begin.is_set()
        computing.cancel()
        await asyncio.wait([computing])
        await asyncio.wait_for(asyncio.gather(sampling, service.sample(), service.step()), 20)
        return service

    assert sorted(asyncio.run(given_up()).done) == ["sample", "sample", "step"]


def test_apart_nobody_waits_for_devices():
    async def at_once():
        service = Service(phase=None)
        await asyncio.gather(service.sample(), service.forward(), service.sample())
        return service.engines

    assert not asyncio.run(at_once()).asked


def test_engines_that_cannot_come_back_end_the_service():
    async def lost():
        service, told = Service(), asyncio.Event()

        async def fails():
            raise EngineLost("engine-0", "died", "")

        service.turn.come_back = fails
        service.turn.on_death = lambda error: told.set()
        await service.forward()
        asking = asyncio.create_task(service.sample())
        await asyncio.wait_for(told.wait(), 30)
        asking.cancel()

    asyncio.run(lost())
