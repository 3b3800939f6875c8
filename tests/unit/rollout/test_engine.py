"""What an engine serves after a refit that failed, and what it tells of routes. vLLM's workers are
a fake here."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import DataError, EngineSilent, NotServed, RefitError, ReplayError
from lora_moe_rl.ports import Manner, Turn
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.rollout import outputs, vllm_engine
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.router_replay.table import RouteTable


class Workers:
    """`refuses`, `stopped`: the method that they answer with an error, or never."""

    errored, refuses, stopped = False, "", ""

    def __init__(self):
        self.forgotten = []  # in the order in which they were told
        self.dropped = []

    async def collective_rpc(self, method, timeout, args):
        if method == "refit_drop":
            self.dropped += args
        if method == "refit_stage":
            self.forgotten += args[2]
        if method == self.stopped:
            await asyncio.sleep(600)
        return [{"error": "worker 0: no"} if method == self.refuses else {"peak_gib": 1.0}]


def serving(version: int, slots: int) -> RolloutEngine:
    engine = RolloutEngine(RunConfig(refit={"slots": slots}), "model", SimpleNamespace(), 0)
    engine.llm, engine.layouts = Workers(), [PartLayout(0, "float32", 0, ())]
    asyncio.run(publish(engine, version))
    return engine


async def publish(engine: RolloutEngine, version: int):
    return await engine.publish(version, SentPart(0, version, "", 0, ()))


@pytest.mark.parametrize("stage", ["refit_stage", "refit_commit"])
def test_with_one_slot_a_refit_that_fails_says_that_nothing_is_served(stage):
    engine = serving(1, slots=1)
    engine.llm.refuses = stage
    with pytest.raises(RefitError, match="worker 0: no; engine 0 serves no version now"):
        asyncio.run(publish(engine, 2))
    assert not engine.receipts and engine.llm.dropped == [2]


def test_with_two_slots_a_refit_that_fails_leaves_the_version_before():
    engine = serving(1, slots=2)
    engine.llm.refuses = "refit_stage"
    with pytest.raises(RefitError) as caught:
        asyncio.run(publish(engine, 2))
    assert "serves no version" not in str(caught.value) and list(engine.receipts) == [1]
    assert engine.llm.dropped == [2]


@pytest.mark.parametrize("stage", ["refit_stage", "refit_commit"])
async def test_workers_that_are_stopped_in_a_refit_are_waited_for_once(stage, monkeypatch):
    monkeypatch.setattr(vllm_engine, "WORKER_GRACE_S", 0.1)
    engine = RolloutEngine(RunConfig(refit={"timeout_s": 0.3}), "model", None, 0)
    engine.llm, engine.layouts = Workers(), [PartLayout(0, "float32", 0, ())]
    engine.llm.stopped = stage
    began = time.monotonic()
    with pytest.raises(EngineSilent, match=f"no answer to {stage} within refit.timeout_s=0.3 s"):
        await publish(engine, 1)
    assert 0.5 <= time.monotonic() - began < 2 and not engine.receipts


async def test_a_version_waits_for_the_slot_of_one_that_still_answers():
    engine = RolloutEngine(RunConfig(refit={"slots": 1, "timeout_s": 0.05}), "model", None, 0)
    engine.llm, engine.layouts = Workers(), [PartLayout(0, "float32", 0, ())]
    await publish(engine, 1)
    engine.running[1] = 2
    with pytest.raises(
        RefitError, match="version 2: version 1 still serves 2 requests after refit"
    ):
        await publish(engine, 2)
    assert list(engine.receipts) == [1]
    asyncio.get_running_loop().call_later(0.02, engine.running.update, {1: 0})
    await publish(engine, 2)
    assert list(engine.receipts) == [2] and engine.llm.forgotten == [1]
    with pytest.raises(RefitError, match="versions only grow"):
        await publish(engine, 1)
    await publish(engine, 3)
    assert engine.llm.forgotten == [1, 2]


async def test_a_version_about_to_leave_its_slot_begins_no_turn_beside_the_samples():
    """So that a newer one waits for those that have begun, and no longer."""
    engine = RolloutEngine(RunConfig(refit={"slots": 2}), "model", None, 0)
    engine.llm, engine.layouts = Workers(), [PartLayout(0, "float32", 0, ())]
    await publish(engine, 1)
    await publish(engine, 2)
    engine.running[1] = 1
    publishing = asyncio.create_task(publish(engine, 3))
    while engine.leaving is None:
        await asyncio.sleep(0)
    with pytest.raises(NotServed) as info:
        await engine.say([7], 1, Turn(0, 0, 0, 5), 0, Manner())
    with pytest.raises(NotServed):
        await engine.sample_each(1, [7], 1, [0], Manner(max_tokens=5), 0)
    with pytest.raises(NotServed):
        await engine.score_prompt([7], 1, 0)
    assert info.value.served == (2,)
    engine.running[1] = 0
    await publishing
    assert engine.leaving is None and list(engine.receipts) == [2, 3]


async def test_a_pinned_version_keeps_its_slot_and_the_next_oldest_goes():
    engine = RolloutEngine(RunConfig(refit={"slots": 3}), "model", None, 0)
    engine.llm, engine.layouts = Workers(), [PartLayout(0, "float32", 0, ())]
    for version in (1, 2, 3, 4, 5):
        await publish(engine, version)
        if version == 2:
            await engine.pin(2)
    assert list(engine.receipts) == [2, 4, 5]
    await engine.pin(None)
    await publish(engine, 6)
    assert list(engine.receipts) == [4, 5, 6]


def test_a_probe_tells_equal_routes_from_others_and_whether_any_are_missing(monkeypatch):
    engine = serving(1, slots=2)

    def probed(ids, num_rows=3) -> tuple[str, bool]:
        table = RouteTable.build([np.array(ids)], [num_rows], (0,), num_experts=8, top_k=2)

        async def score(sequences, version):
            return [np.zeros(num_rows)], table

        monkeypatch.setattr(engine, "score", score)
        (_, checksum, complete), sent = asyncio.run(engine.probe([[1] * 4], 1))
        assert sent is table
        return checksum, complete

    routes = [[[0, 1]], [[2, 3]], [[4, 5]]]
    first, complete = probed(routes)
    assert complete and probed(routes) == (first, True)
    assert probed([*routes[:2], [[4, 6]]])[0] != first
    missing, complete = probed(routes[:2])
    assert not complete and missing != first
    assert probed([*routes[:2], [[0, 1]]])[0] != missing


@pytest.mark.parametrize("fault", [None, ReplayError("impossible routes")])
async def test_the_event_loop_goes_on_while_samples_and_routes_are_packed(monkeypatch, fault):
    """It feeds vLLM; and what goes wrong there is told as if it had been here."""
    engine = RolloutEngine(RunConfig(), "model", SimpleNamespace(), 0)
    engine.sampling = None
    loop_went_on = threading.Event()

    async def request(*_, may_end):
        asyncio.get_running_loop().call_soon(loop_went_on.set)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], finish_reason="stop")])

    def packed(pieces, turn):
        assert loop_went_on.wait(5), "the event loop waits for the packing"
        if fault:
            raise fault
        return pieces, turn

    monkeypatch.setattr(engine, "_request", request)
    monkeypatch.setattr(engine, "_lora_request", lambda version: None)
    monkeypatch.setattr(engine, "_packed", packed)
    monkeypatch.setattr(outputs, "params_of", lambda *_: None)
    if fault:
        with pytest.raises(ReplayError, match="impossible routes"):
            await engine.sample([1], 1, 7, 0)
    else:
        (((piece,),), _) = await engine.sample([1], 1, 7, 0)
        assert piece.token_ids == [1, 7] and piece.version == 7
    assert engine.finished_samples == (0 if fault else 1)


@pytest.mark.parametrize("token", [-1, 256, 2**40])
async def test_ids_that_the_model_does_not_have_never_come_to_vllm(token):
    spec = SimpleNamespace(shape=SimpleNamespace(vocab_size=256))
    engine = RolloutEngine(RunConfig(), "model", spec, 3)
    engine.llm = None
    told = f"engine 3 .* the token {token}, and the model's are 0 to 255"
    with pytest.raises(DataError, match=told):
        await engine._request([7, token, 255], None, None, None)
    assert not any(engine.running.values())
