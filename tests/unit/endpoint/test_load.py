"""Ten thousand requests at the same time: as many as fit are answered, the others ask again."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest
from echo_source import Echo, ask
from spoken_source import TOKENIZER

from lora_moe_rl.endpoint.admission import Admission
from lora_moe_rl.endpoint.app import Endpoint
from lora_moe_rl.endpoint.rendering import Chats
from lora_moe_rl.endpoint.sessions import Sessions

pytestmark = [pytest.mark.seconds, pytest.mark.timeout(120)]  # imports transformers and openai
MANY, RUNNING, WAITING = 10_000, 256, 4096
SOONER = 20  # times as soon as Retry-After says


def endpoint(source: Echo, *admission: int) -> Endpoint:
    return Endpoint(Sessions(None, source), Chats(TOKENIZER), Admission(*admission))


def asked(prompt: object) -> dict:
    return {"model": "policy", "prompt": str(prompt)}


@pytest.mark.slow
async def test_of_ten_thousand_none_is_lost_and_none_is_answered_twice():
    source = Echo()
    source.go.clear()
    here = endpoint(source, RUNNING, WAITING)
    app, tries, draw = here.app(), Counter(), random.Random(0)

    async def until_answered(number: int) -> str:
        while True:
            tries[number] += 1
            status, headers, body = await ask(app, asked(number))
            if status != 429:
                return body["choices"][0]["text"]
            assert body["error"]["code"] == "rate_limit_exceeded"
            await source.go.wait()
            await asyncio.sleep(draw.uniform(1, 2) * float(headers["retry-after"]) / SOONER)

    asking = [asyncio.create_task(until_answered(number)) for number in range(MANY)]
    while here.admission.inside + here.admission.refused < MANY or source.now < RUNNING:
        await asyncio.sleep(0)
    assert here.admission.inside == RUNNING + WAITING and source.now == RUNNING
    assert here.admission.bytes <= (RUNNING + WAITING) * len(json.dumps(asked(MANY)))
    source.go.set()
    answers = await asyncio.gather(*asking)
    assert answers == [str(number)[::-1] for number in range(MANY)]
    assert source.answered == Counter(map(str, range(MANY)))
    assert source.most == RUNNING and here.admission.refused == tries.total() - MANY
    assert here.admission.inside == here.admission.bytes == 0


async def test_bodies_that_wait_hold_no_more_than_they_may():
    source = Echo()
    source.go.clear()
    long = asked("7" * 300)
    room = 2 * len(json.dumps(long))
    here = endpoint(source, 1, 8, room)
    app = here.app()
    first = [asyncio.create_task(ask(app, long)) for _ in range(2)]
    while here.admission.bytes < room:
        await asyncio.sleep(0)
    status, headers, body = await ask(app, asked("8"))
    assert (status, headers["retry-after"]) == (429, "1")
    assert f"requests hold {room} bytes" in body["error"]["message"]
    source.go.set()
    assert [status for status, *_ in await asyncio.gather(*first)] == [200, 200]
    assert (await ask(app, asked("8")))[0] == 200 and here.admission.bytes == 0


async def test_who_goes_while_it_waits_leaves_its_place_and_is_not_asked_for():
    source = Echo()
    source.go.clear()
    here = endpoint(source, 1, 1)
    app = here.app()
    first = asyncio.create_task(ask(app, asked("1")))
    while not source.now:
        await asyncio.sleep(0)
    await ask(app, asked("2"), ends=True)
    assert here.gone == 1 and here.admission.inside == 1
    await ask(app, b'{"model": "pol', ends=True)  # it goes in the middle of its body
    assert here.gone == 2 and here.admission.inside == 1
    third = asyncio.create_task(ask(app, asked("3")))
    source.go.set()
    assert [status for status, *_ in await asyncio.gather(first, third)] == [200, 200]
    assert source.answered == Counter("13")
