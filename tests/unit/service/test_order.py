"""Requests of one model: one after the other, each once, whatever becomes of their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.errors import DiskError, EngineDied, ServiceError
from lora_moe_rl.service import requests
from lora_moe_rl.service.line import LEARNS, Line
from lora_moe_rl.service.requests import Reply, Request, Requests, in_json

MODEL = "s:train:0"


class Work:
    """Notes in which order it was done; ends when it is let."""

    def __init__(self):
        self.done: list[Any] = []
        self.let = asyncio.Event()
        self.let.set()

    def __call__(self, name: Any, error: Exception | None = None) -> Callable[[], Any]:
        async def run() -> Reply:
            self.done.append(name)
            await self.let.wait()
            if error is not None:
                raise error
            return in_json({"name": name})

        return run


async def told(kept: Requests, id: str, size_alone: bool = False) -> Any:
    return json.loads((await kept.fetch(id, size_alone)).content)


def line(gap_s: float = 60, poll_s: float = 5) -> tuple[Requests, Line, Work]:
    kept = Requests(poll_s=poll_s)
    return kept, Line(kept, MODEL, "s", gap_s), Work()


async def test_what_comes_out_of_order_waits_for_those_before_it():
    kept, model, work = line()
    ids = {n: model.submit(n, LEARNS, work(n)) for n in (3, 1, 2)}
    await asyncio.sleep(0.01)
    assert work.done == []
    ids[0] = model.submit(0, "create_model", work(0))
    for number, id in ids.items():
        assert await told(kept, id) == {"name": number}
    assert work.done == [0, 1, 2, 3]


async def test_a_request_that_comes_twice_is_done_once():
    kept, model, work = line()
    work.let.clear()
    first = model.submit(0, "create_model", work(0))
    assert model.submit(0, "create_model", work("again")) == first
    later = model.submit(1, LEARNS, work(1))
    assert model.submit(1, LEARNS, work("again")) == later
    work.let.set()
    assert await told(kept, first) == {"name": 0}
    assert await told(kept, later) == await told(kept, later) == {"name": 1}
    assert model.submit(1, LEARNS, work("again")) == later  # also when it is answered
    kept.clock = lambda clock=kept.clock: clock() + requests.KEPT_S + 1
    kept.sweep()
    assert model.submit(1, LEARNS, work("again")) == later  # and when it is kept no more
    with pytest.raises(Refused, match="no request .* is kept here"):
        await kept.fetch(later, False)
    assert work.done == [0, 1] and not kept.known
    assert kept.waiting == kept.waiting_bytes == kept.kept_bytes == 0


async def test_a_number_that_asks_for_something_else_is_refused():
    _, model, work = line()
    model.submit(0, "create_model", work(0))
    with pytest.raises(ServiceError, match="was create_model, and now is optim_step"):
        model.submit(0, "optim_step", work(1))


@pytest.mark.parametrize(
    ("error", "category", "message"),
    [
        (ServiceError("yours"), "user", "yours"),
        (EngineDied("ours"), "server", "ours"),
        (
            DiskError("cannot write: full: free some space", ", then go on with --resume"),
            "server",
            "cannot write: full: free some space, then ask again",
        ),
        (KeyError("secret"), "server", "this server has failed; see its log"),
    ],
)
async def test_what_fails_is_told_and_the_next_goes_on(error, category, message):
    kept, model, work = line()
    first = model.submit(0, LEARNS, work(0, error))
    assert await told(kept, first) == {"error": message, "category": category}
    assert model.lost == 0
    assert await told(kept, model.submit(1, LEARNS, work(1))) == {"name": 1}


async def test_a_request_that_never_comes_is_not_waited_for_for_ever():
    kept, model, work = line(gap_s=0.05)
    model.submit(0, "create_model", work(0))
    late = [model.submit(n, LEARNS, work(n)) for n in (2, 4)]
    for id in late:
        failed = await told(kept, id)
        assert "request 1 of model s:train:0 has not come in 0.05 seconds" in failed["error"]
    assert model.lost == 1
    assert await told(kept, model.submit(5, LEARNS, work(5))) == {"name": 5}
    assert work.done == [0, 5]


async def test_a_model_that_ends_disturbs_nothing_that_runs():
    kept, model, work = line()
    work.let.clear()
    first, second = (model.submit(n, LEARNS, work(n)) for n in range(2))
    await asyncio.sleep(0.01)
    model.end("its client said success")
    assert "has ended: its client said success" in (await told(kept, second))["error"]
    with pytest.raises(ServiceError, match="has ended"):
        model.submit(2, LEARNS, work(2))
    work.let.set()
    assert await told(kept, first) == {"name": 0}
    await model.task


async def test_a_client_asks_again_for_what_is_not_there_yet():
    kept, model, work = line(poll_s=0.01)
    work.let.clear()
    id = model.submit(0, LEARNS, work(0))
    again = {"type": "try_again", "request_id": id, "queue_state": "active"}
    assert await told(kept, id) == again and (await kept.fetch(id, False)).status == 408
    work.let.set()
    assert await told(kept, id) == {"name": 0}


async def test_of_a_large_reply_the_size_is_told_first():
    kept, model, work = line()
    id = model.submit(0, LEARNS, work("x" * requests.LARGE))
    size = requests.LARGE + len('{"name": ""}')
    expected = {"status": "complete_metadata", "response_payload_size": size}
    assert await told(kept, id, size_alone=True) == expected
    assert kept.known[id].fetched is None
    assert len((await kept.fetch(id, False)).content) == size
    small = model.submit(1, LEARNS, work(1))
    assert await told(kept, small, size_alone=True) == {"name": 1}


async def test_too_much_that_waits_is_to_be_asked_again(monkeypatch):
    monkeypatch.setattr(requests, "MOST_BYTES", 100)
    kept, model, work = line()
    work.let.clear()
    model.submit(0, LEARNS, work(0), 60)
    with pytest.raises(Refused, match="1 requests wait and hold 60 bytes") as refused:
        model.submit(1, LEARNS, work(1), 60)
    assert refused.value.status == 429
    work.let.set()
    await told(kept, f"{MODEL}:request:0")
    await told(kept, model.submit(1, LEARNS, work(1), 60))


async def test_replies_beyond_what_is_kept_go_the_fetched_ones_first(monkeypatch):
    monkeypatch.setattr(requests, "KEPT_BYTES", 3 * len('{"name": 0}'))
    kept, model, work = line()
    ids = [model.submit(n, LEARNS, work(n)) for n in range(3)]
    for id in ids[1:]:
        await kept.fetch(id, False)
    await told(kept, model.submit(3, LEARNS, work(3)))
    assert [*kept.known] == [ids[0], ids[2], f"{MODEL}:request:3"]


async def test_samples_are_dropped_before_what_cannot_be_asked_anew(monkeypatch):
    monkeypatch.setattr(requests, "KEPT_BYTES", 3 * len('{"name": 0}'))
    kept, model, work = line()
    model.submit(0, LEARNS, work(0))
    for name in "123":
        kept.run(kept.add(Request(name, "sample", "s", 5)), work(int(name)))
    await asyncio.sleep(0.01)
    assert [*kept.known] == [f"{MODEL}:request:0", "2", "3"]
    kept.run(kept.add(Request("4", "sample", "s", 5)), work("longer than all that is kept" * 9))
    await asyncio.sleep(0.01)
    assert [*kept.known] == ["4"]
    await kept.fetch("4", False)


async def test_what_is_cancelled_elsewhere_ends_no_line():
    kept, model, work = line()
    other = asyncio.ensure_future(asyncio.Event().wait())
    alone = kept.add(Request("a", "sample", "s", 5))

    async def waiting() -> Reply:
        await other
        return in_json({})

    first = model.submit(0, LEARNS, waiting)
    kept.run(alone, waiting)
    await asyncio.sleep(0.01)
    other.cancel()
    failed = {"error": "this server has failed; see its log", "category": "server"}
    assert await told(kept, first) == await told(kept, "a") == failed
    assert await told(kept, model.submit(1, LEARNS, work(1))) == {"name": 1}


async def test_nobody_fetches():
    now = [0.0]
    kept, work = Requests(lambda: now[0]), Work()
    request = kept.add(Request("a", "sample", "s", 5))
    await kept.answer(request, work(0))
    now[0] = requests.UNFETCHED_S - 1
    kept.sweep()
    assert kept.known
    now[0] += 2
    kept.sweep()
    assert not kept.known


async def test_only_what_stands_alone_is_given_up():
    kept, model, work = line()
    work.let.clear()
    alone = kept.add(Request("a", "sample", "s", 5))
    kept.run(alone, work("alone"))
    follows = model.submit(0, LEARNS, work(0))
    await asyncio.sleep(0.01)
    with pytest.raises(ServiceError, match="is not given up: others follow it"):
        kept.cancel(follows)
    kept.cancel("a")
    kept.cancel("not there")
    assert (await told(kept, "a"))["error"] == "this request was given up"
    other = kept.add(Request("b", "sample", "s", 5))
    kept.run(other, work("other"))
    kept.forget("s")  # before it has begun
    await asyncio.sleep(0.01)
    assert "a" not in kept.known and other.reply.done()
    assert kept.waiting == 1
