"""When a merged engine changes its weights, and what it refuses meanwhile. vLLM is a fake here: the
order of what it is asked is what counts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.kernels.merge.rounding import Arrived
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.rollout.merged import MergedRolloutEngine

SPEC = SimpleNamespace(shape=SimpleNamespace(vocab_size=10))
LAYOUTS = [PartLayout(0, "float32", 0, ())]
ARRIVED = Arrived(1.0, 2.0, 3.0, 4.0)


class FakeLLM:
    """Requests run until `finish` is set; `resets`: what the next resets of the prefix cache say;
    `refuses`: the method that the workers answer with an error."""

    errored = False

    def __init__(self):
        self.asked: list[str] = []
        self.finish = asyncio.Event()
        self.resets: list[bool] = []
        self.refuses = ""

    async def collective_rpc(self, method, timeout, args):
        self.asked.append(method)
        if method == self.refuses:
            return [{"error": "worker 0: no"}]
        told = {"all": asdict(ARRIVED), "of its experts": asdict(ARRIVED)}
        alike = {"all": asdict(ARRIVED), "of other experts": asdict(ARRIVED)}
        committed = [{"arrived": told, "peak_gib": 1.0}, {"arrived": alike, "peak_gib": 2.0}]
        return committed if method == "refit_commit" else [{}]

    async def reset_prefix_cache(self) -> bool:
        self.asked.append("reset")
        return self.resets.pop(0) if self.resets else True

    async def generate(self, prompt, params, request_id, lora_request):
        assert lora_request is None
        self.asked.append("begin")
        await self.finish.wait()
        self.asked.append("end")
        yield "output"


def make_engine(timeout_s: float = 30) -> MergedRolloutEngine:
    config = RunConfig(refit={"mode": "merged", "timeout_s": timeout_s})
    engine = MergedRolloutEngine(config, "model", SPEC, 0)
    engine.llm, engine.layouts = FakeLLM(), LAYOUTS
    return engine


def publish(engine: MergedRolloutEngine, version: int):
    return engine.publish(version, SentPart(0, version, "", 0, ()))


def ask(engine: MergedRolloutEngine, version: int | None):
    return asyncio.ensure_future(engine._request([1, 2], SimpleNamespace(n=1), version))


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_weights_change_only_while_nothing_runs():
    async def go():
        engine = make_engine()
        llm = engine.llm
        await publish(engine, 1)
        running = ask(engine, 1)
        await until(lambda: "begin" in llm.asked)
        publishing = asyncio.ensure_future(publish(engine, 2))
        await until(lambda: llm.asked.count("refit_stage") == 2)
        late = [ask(engine, version) for version in (1, 2)]
        await asyncio.sleep(0.05)
        assert llm.asked.count("begin") == 1 and llm.asked.count("refit_commit") == 1
        llm.resets = [False, True]  # a request's blocks are freed a little after its end
        llm.finish.set()
        receipt = await publishing
        assert receipt.version == 2 and await running == "output"
        assert receipt.arrived == dict.fromkeys(
            ("all", "of its experts", "of other experts"), ARRIVED
        )
        with pytest.raises(RefitError, match=r"asked for adapter version 1, but serves \[2\]"):
            await late[0]
        assert await late[1] == "output"
        order = [what for what in llm.asked if what != "begin"]
        first, rest = order[:3], order[3:]
        assert first == ["refit_stage", "reset", "refit_commit"]
        assert rest == ["refit_stage", "end", "reset", "reset", "refit_commit", "end"]

    asyncio.run(go())


def test_a_request_that_does_not_end_leaves_the_old_version_served():
    async def go():
        engine = make_engine(timeout_s=0.05)
        await publish(engine, 1)
        running = ask(engine, 1)
        await until(lambda: "begin" in engine.llm.asked)
        with pytest.raises(RefitError, match=r"1 requests still run after refit.timeout_s=0.05"):
            await publish(engine, 2)
        assert engine.llm.asked.count("refit_commit") == 1
        assert engine.llm.asked[-1] == "refit_drop"
        engine.llm.finish.set()
        assert await running == await ask(engine, 1) == "output"

    asyncio.run(go())


def test_what_the_workers_refuse_beforehand_changes_nothing():
    async def go():
        engine = make_engine()
        engine.llm.finish.set()
        await publish(engine, 1)
        engine.llm.refuses = "refit_stage"
        with pytest.raises(RefitError, match="worker 0: no"):
            await publish(engine, 2)
        assert await ask(engine, 1) == "output"
        engine.llm.refuses = ""
        assert (await publish(engine, 2)).version == 2

    asyncio.run(go())


def test_a_refit_that_failed_halfway_is_served_by_nothing_until_a_whole_one():
    async def go():
        engine = make_engine()
        engine.llm.finish.set()
        assert await ask(engine, None) == "output"
        engine.llm.refuses = "refit_commit"
        with pytest.raises(RefitError, match="worker 0: no"):
            await publish(engine, 1)
        for version in (None, 0, 1):
            with pytest.raises(RefitError, match="version 1 failed halfway: .*no; publish a newer"):
                await ask(engine, version)
        engine.llm.refuses = ""
        with pytest.raises(RefitError, match="versions only grow"):
            await publish(engine, 1)
        await publish(engine, 2)
        assert await ask(engine, 2) == "output"
        with pytest.raises(RefitError, match="asked for the base, but its weights are merged"):
            await ask(engine, None)

    asyncio.run(go())


def test_a_version_that_is_taken_back_leaves_none():
    async def go():
        engine = make_engine()
        engine.llm.finish.set()
        await publish(engine, 1)
        await engine.drop(1)
        with pytest.raises(RefitError, match="serves nothing: adapter version 1 was taken back"):
            await ask(engine, 1)

    asyncio.run(go())
