"""Requests that go to vLLM's core together: it gets what it gets of a message a request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType, UtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, DPAsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lora_moe_rl.rollout import gathered_requests
from lora_moe_rl.rollout.gathered_requests import METHOD, stock_add

ENGINE = b"\x00\x00"
ADD, ABORT, UTILITY = (
    getattr(EngineCoreRequestType, name).value for name in ("ADD", "ABORT", "UTILITY")
)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    for thing, name in (
        (AsyncMPClient, "add_request_async"),
        (AsyncMPClient, "_send_input_message"),
    ):
        monkeypatch.setattr(thing, name, getattr(thing, name))  # so that it is put back
    monkeypatch.setattr(EngineCoreProc, METHOD, None, raising=False)
    gathered_requests.install()


def a_front(kind: type[AsyncMPClient] = AsyncMPClient) -> Any:
    """vLLM's, with a socket that keeps what is sent."""
    front: Any = object.__new__(kind)
    sent: list[list[bytes]] = []

    def send_multipart(frames, copy):
        sent.append([bytes(frame) for frame in frames])
        return asyncio.get_running_loop().create_future()

    front.input_socket = SimpleNamespace(send_multipart=send_multipart)
    front.resources = SimpleNamespace(engine_dead=False)
    front.encoder, front.core_engine, front.client_index = MsgpackEncoder(), ENGINE, 3
    front.utility_results, front.outputs_queue = {}, asyncio.Queue()
    front.__dict__["_ensure_output_queue_task"] = lambda: None
    front.__dict__["sent"] = sent
    return front


def a_request(name: str, **more: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[5, 6, 7], mm_features=None,
        sampling_params=SamplingParams(max_tokens=4, seed=11), pooling_params=None,
        arrival_time=1.5, lora_request=None, cache_salt=None, data_parallel_rank=None, **more,
    )  # fmt: skip


class Core:
    """What a core does with what it gets, by vLLM's own dispatch."""

    shutdown_state = None
    _convert_msgspec_args = staticmethod(EngineCoreProc._convert_msgspec_args)
    _invoke_utility_method = staticmethod(EngineCoreProc._invoke_utility_method)

    def __init__(self, refuses: str = ""):
        self.refuses, self.added, self.refused, self.said = refuses, [], [], []
        self.output_queue = SimpleNamespace(put_nowait=self.said.append)
        setattr(self, METHOD, getattr(EngineCoreProc, METHOD).__get__(self))

    def take(self, frames: list[bytes]) -> None:
        engine, kind, *data = frames
        assert engine == ENGINE and kind == UTILITY
        self._handle_client_request(EngineCoreRequestType.UTILITY, MsgpackDecoder().decode(data))

    def _handle_client_request(self, kind, request):
        EngineCoreProc._handle_client_request(self, kind, request)  # pyright: ignore

    def _reject_add_in_shutdown(self, request):
        return False

    def _reject_utility_in_shutdown(self, *call):
        return False

    def preprocess_add_request(self, request):
        if request.request_id == self.refuses:
            raise ValueError("not this one")
        return request, 0

    def add_request(self, request, wave):
        self.added.append(request)

    def _handle_request_preproc_error(self, request):
        self.refused.append(request.request_id)


def answer(core: Core) -> UtilityOutput:
    ((client, outputs),) = core.said
    assert client == 3
    return outputs.utility_output


def test_requests_of_one_turn_are_one_message_and_arrive_as_by_themselves():
    async def both() -> tuple[list[list[bytes]], list[list[bytes]]]:
        ours, stock = a_front(), a_front()
        for name in "abc":
            await ours.add_request_async(a_request(name))
        assert not ours.sent
        await asyncio.sleep(0)
        stock.__dict__["_send_input_message"] = lambda message, engine: (
            gathered_requests.stock_send(stock, message, engine)
        )
        for name in "abc":
            sending = asyncio.ensure_future(stock_add(stock, a_request(name)))
            await asyncio.sleep(0)
            sending.cancel()
        return ours.sent, stock.sent

    ours, stock = asyncio.run(both())
    assert len(ours) == 1 and [frames[1] for frames in stock] == [ADD] * 3
    core = Core()
    core.take(ours[0])
    decoder = MsgpackDecoder(EngineCoreRequest)
    expected = [decoder.decode(frames[2:]) for frames in stock]
    assert [request.request_id for request in core.added] == ["a", "b", "c"]
    assert [repr(one) for one in core.added] == [repr(one) for one in expected]
    assert core.added[0].client_index == 3
    assert answer(core).failure_message is None


def test_what_is_sent_after_a_request_arrives_after_it():
    """An abort that overtook its request would leave it running for nobody."""

    async def kinds() -> list[bytes]:
        front = a_front()
        await front.add_request_async(a_request("a"))
        abort = asyncio.ensure_future(front.abort_requests_async(["a"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        abort.cancel()
        return [frames[1] for frames in front.sent]

    assert asyncio.run(kinds()) == [UTILITY, ABORT]


def test_a_request_that_the_core_refuses_does_not_stop_the_others():
    async def sent() -> list[bytes]:
        front = a_front()
        for name in "abc":
            await front.add_request_async(a_request(name))
        await asyncio.sleep(0)
        return front.sent[0]

    core = Core(refuses="b")
    core.take(asyncio.run(sent()))
    assert [request.request_id for request in core.added] == ["a", "c"] and core.refused == ["b"]


def test_a_call_that_fails_is_told_to_all_that_wait():
    async def told() -> Exception:
        front = a_front()
        await front.add_request_async(a_request("a"))
        await asyncio.sleep(0)
        (future,) = front.utility_results.values()
        future.set_exception(RuntimeError(f"Call to {METHOD} method failed"))
        return await asyncio.wait_for(front.outputs_queue.get(), 1)

    assert METHOD in str(asyncio.run(told()))


def test_a_dead_engine_takes_no_request():
    async def add() -> None:
        front = a_front()
        front.resources.engine_dead = True
        await front.add_request_async(a_request("a"))

    with pytest.raises(EngineDeadError):
        asyncio.run(add())


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (DPAsyncMPClient, {}),
        (AsyncMPClient, {"prompt_embeds": torch.zeros(64, 64)}),
    ],
    ids=["several ranks", "an array beside it"],
)
def test_what_has_a_way_of_its_own_keeps_it(kind, more, monkeypatch):
    went = []

    async def stock(self, request):
        went.append(request.request_id)

    monkeypatch.setattr(gathered_requests, "stock_add", stock)

    async def add() -> Any:
        front = a_front(kind)
        await AsyncMPClient.add_request_async(front, a_request("a", **more))
        await asyncio.sleep(0)
        return front

    front = asyncio.run(add())
    assert went == ["a"] and not front.sent
