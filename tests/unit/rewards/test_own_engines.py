"""The run's own engines as a judge's server: a real judge asks over HTTP, and what would be an
engine answers."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request

import pytest

from lora_moe_rl.errors import ActorFailed, RewardError
from lora_moe_rl.ports import Written
from lora_moe_rl.rewards import Judge, own_engines
from lora_moe_rl.rewards.own_engines import OwnEngines
from lora_moe_rl.tiny.tokenizer import make_tokenizer

LONGEST = 64
TEMPLATE = "{prompt} {completion}"


@pytest.fixture
def server():
    found = OwnEngines()
    yield found
    found.close()


def connected(server, answer="Score: 7", error=None) -> list[tuple]:
    """What is asked from now on, in the loop that runs."""
    asked = []

    async def write(*asked_for) -> Written:
        asked.append(asked_for)
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return Written(answer, "stop", 3)

    server.connect(write, make_tokenizer(), LONGEST)
    return asked


def judged(server, completions, connect=True, error=None, **args):
    """(rewards of a prompt's completions, what the engine was asked)."""

    async def run():
        asked, bound = connected(server, error=error) if connect else [], {"concurrency": 1}
        judge = Judge(server.url, "base", **{"template": TEMPLATE, "retries": 0, **bound} | args)
        n = len(completions)
        rewards = await judge(["why"] * n, completions, [[1]] * n, None, lambda *_: None, None)
        return rewards, asked

    return asyncio.run(run())


def test_a_judge_is_answered_by_the_base(server):
    options = {"temperature": 0.25, "max_tokens": 5, "seed": 11}
    rewards, asked = judged(server, ["so", "thus"], options=options)
    assert rewards == [0.7, 0.7]
    ids, most, temperature, seed = asked[0]
    assert bytes(ids).decode() == "user: why so\nassistant: "
    assert (most, temperature, seed) == (5, 0.25, 11)


def test_a_question_without_a_seed_has_one_of_its_own(server):
    _, asked = judged(server, ["so", "thus"])
    _, again = judged(server, ["thus", "so"])
    assert asked[0][3] == again[1][3] != asked[1][3]
    # All the room that is left, and OpenAI's temperature.
    assert [(most + len(ids), t) for ids, most, t, _ in asked] == [(LONGEST, 1.0)] * 2


@pytest.mark.parametrize(
    ("args", "connect", "reason"),
    [
        ({}, False, "have not started yet"),
        ({"template": "{completion}" + 60 * "x"}, True, "model.max_length=64"),
        ({"options": {"top_p": 0.5}}, True, "top_p is not taken here"),
    ],
)
def test_what_cannot_be_answered_is_a_failure_that_says_so(server, args, connect, reason):
    ((error,), asked) = judged(server, ["so"], connect, **args)
    assert not asked
    with pytest.raises(RewardError, match=reason):
        raise error


def test_nothing_more_is_sampled_for_who_has_gone(server, monkeypatch):
    monkeypatch.setattr(own_engines, "LOOK_S", 0.01)

    async def run() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def write(*asked_for) -> Written:
            begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                ended.set()
            raise AssertionError

        server.connect(write, make_tokenizer(), LONGEST)
        body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "?"}]})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(server._http.server_address, timeout=10) as connection:
            connection.sendall(f"{head}{body}".encode())
            await asyncio.wait_for(begun.wait(), 60)
            assert not ended.is_set()
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(run())


def test_a_time_out_of_the_engines_is_a_failure(server):
    ((error,), asked) = judged(server, ["so"], error=TimeoutError("no answer"))
    assert len(asked) == 1
    with pytest.raises(RewardError, match="no answer"):
        raise error


def test_an_engine_that_dies_is_a_failure(server):
    died = ActorFailed("engine-0", "killed")
    ((error,), asked) = judged(server, ["so"], error=died)
    assert len(asked) == 1
    with pytest.raises(RewardError, match="engine-0 failed: killed"):
        raise error


def status_of(url: str, body: dict) -> int:
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        return urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


def test_other_models_and_places_are_not_there(server):
    async def run():
        connected(server)
        body = {"model": "base", "messages": [{"role": "user", "content": "?"}]}
        chat = f"{server.url}/chat/completions"
        asked = [(chat, body), (chat, body | {"model": "other"}), (f"{server.url}/models", body)]
        return [await asyncio.to_thread(status_of, url, sent) for url, sent in asked]

    assert asyncio.run(run()) == [200, 404, 404]


@pytest.mark.parametrize(
    ("length", "status"),
    [(2**50, 413), (-1, 411), ("9" * 5000, 411), ("x", 411), ("0x10", 411), ("", 411), (4, 400)],
)
def test_a_length_that_is_none_or_too_long_takes_no_memory_and_no_thread(server, length, status):
    async def run():
        connected(server)
        return await asyncio.to_thread(ask, f"Content-Length: {length}")

    def ask(header: str) -> tuple[bytes, bytes]:
        with socket.create_connection(server._http.server_address, timeout=10) as connection:
            connection.sendall(
                f"POST /v1/chat/completions HTTP/1.1\r\n{header}\r\n\r\n[1]\n".encode()
            )
            return connection.recv(4096).split(b"\r\n", 1)

    first, rest = asyncio.run(run())
    assert first.split()[1] == str(status).encode(), (first, rest)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"messages": []},
        {"messages": "user: ?"},
        {"temperature": 3},
        {"temperature": "warm"},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"seed": 2**64},
    ],
)
def test_a_request_out_of_bounds_is_refused_as_the_askers_fault(server, wrong):
    async def run():
        asked = connected(server)
        body = {"model": "base", "messages": [{"role": "user", "content": "?"}]}
        status = await asyncio.to_thread(status_of, f"{server.url}/chat/completions", body | wrong)
        return status, asked

    assert asyncio.run(run()) == (400, [])


def test_a_token_that_the_model_lacks_is_the_askers_fault(server):
    """Not an engine's, which would be asked again and again."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<added>"]})
    tokenizer.model_vocab_size = len(tokenizer) - 1
    server._tokenizer, server._longest = tokenizer, LONGEST
    body = {"model": "base", "messages": [{"role": "user", "content": "<added>"}]}
    with pytest.raises(own_engines.Refused, match="holds '<added>', which the tokenizer") as told:
        server.asked(json.dumps(body).encode())
    assert told.value.status == 400
