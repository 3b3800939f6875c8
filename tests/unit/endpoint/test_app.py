"""The endpoint, asked by the real openai client: its answers, and what becomes of the samples."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest
from spoken_source import EOS, TOKENIZER, Speaker, Spoken, client, listening
from written_policy import check_bound, table_of

from lora_moe_rl.endpoint.sessions import Session, Sessions
from lora_moe_rl.errors import EngineDied
from lora_moe_rl.router_replay.travel import join
from lora_moe_rl.tiny.tokenizer import make_tokenizer

pytestmark = pytest.mark.seconds  # imports transformers and openai
HELLO = {"role": "user", "content": "2+3="}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def opened(*texts: str, **lengths: int) -> tuple[Sessions, Session, Speaker]:
    speaker = Speaker(*texts)
    sessions = Sessions("owner")
    return sessions, sessions.add(Session(Spoken(speaker, **lengths))), speaker


def samples_of(session: Session):
    """With a check that every row of routes is there, and is that of one request."""
    samples, routes = session.conversations["policy"].samples()
    check_bound(samples, join(routes))
    table = join(routes).table()
    np.testing.assert_array_equal(table.ids, table_of([s.token_ids.tolist() for s in samples]).ids)
    assert table.valid.all()
    return samples


def shown(sample) -> str:
    return "".join("$" if t == EOS else chr(t) for t in sample.token_ids.tolist())


async def test_a_chat_that_begins_with_all_messages_so_far_goes_on_token_for_token():
    sessions, session, speaker = opened("5", "10")
    async with listening(sessions) as (_, at):
        agent = client(at, session.key)
        first = await agent.chat.completions.create(model="policy", messages=[HELLO], logprobs=True)
        said = first.choices[0].message
        assert said.content == "5" and first.choices[0].finish_reason == "stop"
        assert first.model == "policy@4" and first.usage.completion_tokens == 2
        then = [HELLO, said, {"role": "user", "content": "twice?"}]
        second = await agent.chat.completions.create(model="policy", messages=then)
    assert second.choices[0].message.content == "10" and session.forks == 0
    (sample,) = samples_of(session)
    assert shown(sample) == "user: 2+3=\nassistant: 5$\nuser: twice?\nassistant: 10$"
    assert [s.author for s in sample.segments] == ["user", "policy", "user", "policy"]
    assert sample.mask.sum() == len("5$10$") and session.conversations["policy"].turns == 2
    logprobs = [one.logprob for one in first.choices[0].logprobs.content]
    assert np.float32(logprobs).tolist() == sample.logprobs[:2].tolist()
    assert speaker.asked[1][1].recorded == len("user: 2+3=\nassistant: 5")


class Lossy:
    """Tokenizes "ab" as one token, which a model may have sampled as two."""

    chat_template = TOKENIZER.chat_template

    def encode(self, text, add_special_tokens=False):
        return TOKENIZER.encode(text.replace("ab", "\x01"), add_special_tokens=False)

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)


@pytest.mark.parametrize("way", ["chat", "text"])
async def test_what_was_sampled_is_never_tokenised_again(way):
    sessions, session, _ = opened("abab", "9")
    async with listening(sessions, Lossy()) as (_, at):
        agent = client(at, session.key)
        if way == "chat":
            first = await agent.chat.completions.create(model="policy", messages=[HELLO])
            messages = [HELLO, {"role": "assistant", "content": "abab"}, HELLO]
            assert first.choices[0].message.content == "abab"
            await agent.chat.completions.create(model="policy", messages=messages)
        else:
            await agent.completions.create(model="policy", prompt="ab2+3=")
            await agent.completions.create(model="policy", prompt="ab2+3=abab, ab")
    (sample,) = samples_of(session)
    ids = sample.token_ids.tolist()
    assert session.forks == 0 and Lossy().encode("abab") != list(b"abab")
    assert bytes(ids).count(b"abab") == 1
    assert ids.count(1) == (0 if way == "chat" else 2)  # what was asked is "ab" as one token


class Two(Spoken):
    """A policy, and a base that speaks for itself."""

    def __init__(self, policy: Speaker, base: Speaker):
        super().__init__(policy)
        self.base = base

    def policy(self, asked):
        return asked.model, self.base if asked.model == "base" else self.speaker


async def test_what_another_model_said_is_text_and_not_its_tokens():
    policy, sessions = Speaker("A"), Sessions("owner")
    session = sessions.add(Session(Two(policy, Speaker("U"))))
    async with listening(sessions) as (_, at):
        agent = client(at, session.key)
        said = (await agent.completions.create(model="base", prompt="Q: ")).choices[0].text
        await agent.completions.create(model="policy", prompt=f"Q: {said} A: ")
    ((token_ids, *_),) = policy.asked
    assert TOKENIZER.decode(token_ids) == "Q: U A: "  # without the base's end token


@pytest.mark.parametrize("form", ["json", "python"])
async def test_a_call_that_cannot_be_sent_is_text(form):
    """No failure of the server, which a client would ask again."""
    said = {
        "json": '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        "python": "[add(a={1})]",
    }[form]
    sessions, session, _ = opened(said)
    async with listening(sessions, calls=form) as (_, at):
        agent = client(at, session.key)
        asked = await agent.chat.completions.create(model="policy", messages=[HELLO], tools=[ADD])
    assert asked.choices[0].message.content == said and not asked.choices[0].message.tool_calls
    assert session.forks == 0 and len(samples_of(session)) == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": ["x"]},
        {"role": "assistant", "content": "", "tool_calls": 5},
        {"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]},
        {"role": "user", "content": "\ud800"},
    ],
    ids=str,
)
async def test_a_malformed_message_is_the_clients_fault(message):
    sessions, session, _ = opened("5")
    async with listening(sessions) as (_, at):
        body = {"model": "policy", "messages": [HELLO, message, HELLO]}
        async with httpx.AsyncClient() as http:
            answer = await http.post(
                f"{at.url}/chat/completions",
                content=json.dumps(body),
                headers={"Authorization": f"Bearer {session.key}"},
            )
    assert answer.status_code == 400, answer.text


async def test_a_chat_that_was_changed_is_a_fork_and_the_first_one_may_still_go_on():
    sessions, session, _ = opened("5", "6", "7")
    more = {"role": "user", "content": "and?"}
    async with listening(sessions) as (_, at):
        agent = client(at, session.key)
        await agent.chat.completions.create(model="policy", messages=[HELLO])
        for said in ("4", "5"):  # the first is not what was answered
            messages = [HELLO, {"role": "assistant", "content": said}, more]
            await agent.chat.completions.create(model="policy", messages=messages)
    assert session.forks == 1
    fork, first = samples_of(session)  # the one that was gone on with is the last
    assert shown(fork) == "user: 2+3=\nassistant: 4\nuser: and?\nassistant: 6$"
    assert shown(first) == "user: 2+3=\nassistant: 5$\nuser: and?\nassistant: 7$"
    assert fork.mask.sum() == 2 and first.mask.sum() == 4


async def test_tools_are_told_called_and_answered_as_the_protocol_has_it():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    sessions, session, _ = opened("I see." + call, "3")
    async with listening(sessions) as (_, at):
        agent = client(at, session.key)
        first = await agent.chat.completions.create(model="policy", messages=[HELLO], tools=[ADD])
        (called,) = first.choices[0].message.tool_calls
        assert first.choices[0].finish_reason == "tool_calls"
        assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 1})
        assert first.choices[0].message.content == "I see."
        answer = {"role": "tool", "tool_call_id": called.id, "content": "2"}
        messages = [HELLO, first.choices[0].message, answer]
        second = await agent.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        assert second.choices[0].message.content == "3"
        fork = await agent.chat.completions.create(model="policy", messages=[*messages[1:]])
        assert fork.choices[0].message.content == "3"
    assert session.forks == 1
    one, other = samples_of(session)
    assert one.mask.sum() == len("I see." + call + "$3$")
    assert "You can call these tools" in shown(one) and '"Adds."' in shown(one)
    assert shown(one).endswith(call + "$\ntool: 2\nassistant: 3$")
    # A template that does not show calls of tools is told of them in the text.
    assert "I see." + call in shown(other)


def falls(text):
    """A form that cannot read what it is given."""
    raise KeyError("name")


async def test_a_form_that_falls_is_told_and_the_turn_said_once(monkeypatch, caplog):
    monkeypatch.setattr("lora_moe_rl.environments.parts.tool_calls.load_function", lambda _: falls)
    sessions, session, policy = opened("[call]")
    async with listening(sessions, calls="mine.py:falls") as (_, at):
        asked = {"model": "policy", "messages": [HELLO], "tools": [ADD]}
        message = (
            (await client(at, session.key).chat.completions.create(**asked)).choices[0].message
        )
        assert message.content == "[call]" and not message.tool_calls
        await client(at, session.key).chat.completions.create(**asked)
    assert len(policy.asked) == 2 == sum(len(one.turn_ends) for one in samples_of(session))
    assert sum("environment.calls raised KeyError" in one for one in caplog.messages) == 1


async def test_a_text_that_is_asked_again_after_an_empty_answer_is_another_sample():
    sessions, session, policy = opened("", "5")
    async with listening(sessions) as (_, at):
        for _ in range(2):
            await client(at, session.key).completions.create(model="policy", prompt="2+3=")
    assert [list(ids) for ids, *_ in policy.asked] == [[*b"2+3="]] * 2
    assert [one.response_ids.tolist() for one in samples_of(session)] == [[EOS], [*b"5", EOS]]


async def test_token_ids_go_in_and_out_and_go_on():
    sessions, session, _ = opened("5", "10")
    async with listening(sessions) as (_, at), httpx.AsyncClient(base_url=at.root) as http:
        http.headers["Authorization"] = f"Bearer {session.key}"
        asked = {"model": "policy", "token_ids": [7, 8], "sampling_params": {"max_tokens": 9,
                 "logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [EOS]},
                 "cache_salt": "4"}  # fmt: skip
        first = (await http.post("/inference/v1/generate", json=asked)).json()
        ids = first["choices"][0]["token_ids"]
        assert ids == [*b"5", EOS] and len(first["choices"][0]["logprobs"]["content"]) == 2
        asked["token_ids"] = [7, 8, *ids, 3]
        await http.post("/inference/v1/generate", json=asked)
    (sample,) = samples_of(session)
    assert sample.token_ids.tolist() == [7, 8, *b"5", EOS, 3, *b"10", EOS]
    assert session.source.asked[0].sampling.stop_token_ids == [EOS]


async def test_a_stream_is_the_same_answer():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    sessions, session, _ = opened("5", "five", call)
    async with listening(sessions) as (_, at):
        agent = client(at, session.key)
        asked = {"model": "policy", "messages": [HELLO], "stream": True}
        options = {"include_usage": True}
        stream = await agent.chat.completions.create(**asked, stream_options=options)
        events = [event async for event in stream]
        assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == "5"
        assert events[-2].choices[0].finish_reason == "stop"
        assert events[-1].usage.completion_tokens == 2
        stream = await agent.completions.create(model="policy", prompt="a", stream=True)
        assert [event.choices[0].text async for event in stream] == ["five"]
        async with agent.chat.completions.stream(
            model="policy", messages=[HELLO], tools=[ADD]
        ) as stream:
            final = await stream.get_final_completion()
        (called,) = final.choices[0].message.tool_calls
        assert called.function.arguments == '{"a": 1}'


async def test_a_client_that_goes_before_its_answer_leaves_nothing_and_may_ask_again():
    sessions, session, speaker = opened("5")
    async with listening(sessions) as (endpoint, at):
        agent = client(at, session.key)
        await agent.chat.completions.create(model="policy", messages=[HELLO])
        speaker.wait.clear()
        more = [HELLO, {"role": "assistant", "content": "5"}, HELLO]
        with pytest.raises(openai.APITimeoutError):
            await agent.chat.completions.create(model="policy", messages=more, timeout=0.2)
        while not endpoint.gone:
            await asyncio.sleep(0.01)
        assert speaker.cancelled == 1 and endpoint.admission.inside == 0
        speaker.wait.set()
        other = [*more[:2], {"role": "user", "content": "and?"}]
        await agent.chat.completions.create(model="policy", messages=other)
    (sample,) = samples_of(session)
    assert session.forks == 0
    assert shown(sample) == "user: 2+3=\nassistant: 5$\nuser: and?\nassistant: 5$"


async def test_whom_a_server_that_ends_does_not_answer_is_told_so(monkeypatch):
    monkeypatch.setattr("lora_moe_rl.endpoint.listening.END_S", 0.1)
    sessions, session, speaker = opened("5")
    speaker.wait.clear()
    async with listening(sessions) as (endpoint, at):
        asked = client(at, session.key).chat.completions.create(model="policy", messages=[HELLO])
        asking = asyncio.create_task(asked)
        while not session.lock.locked():
            await asyncio.sleep(0.01)
        at.stop()
        with pytest.raises(openai.InternalServerError, match="this server has been ended"):
            await asking
    assert speaker.cancelled == 1 and endpoint.admission.inside == 0


async def test_keys_open_their_own_session_and_no_other():
    sessions, one, _ = opened("5")
    other = sessions.add(Session(Spoken(Speaker("6"))))

    async def ask(key, path="/v1"):
        agent = client(at, key, path=path)
        return (await agent.completions.create(model="policy", prompt="a")).choices[0].text

    async with listening(sessions) as (_, at):
        assert await ask(one.key) == "5" and await ask(other.key) == "6"
        assert await ask(one.key, f"/sessions/{one.name}/v1") == "5"
        assert await ask("owner", f"/sessions/{other.name}/v1") == "6"
        with pytest.raises(openai.PermissionDeniedError, match="another session"):
            await ask(one.key, f"/sessions/{other.name}/v1")
        for key in ("wrong", one.key + "0", "owner"):
            with pytest.raises(openai.AuthenticationError):
                await ask(key)
        with pytest.raises(openai.NotFoundError, match="no session nobody"):
            await ask("owner", "/sessions/nobody/v1")
        sessions.end(one, "its reward is set")
        for path in ("/v1", f"/sessions/{one.name}/v1"):
            with pytest.raises(openai.APIStatusError, match="its reward is set") as error:
                await ask(one.key, path)
            assert error.value.status_code == 410
    assert len(samples_of(other)) == 2 and other.forks == 1


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"n": 2}, "n=2 is not served here: ask several times"),
        ({"stop": "\n"}, "stop_token_ids"),
        ({"top_logprobs": 5}, "top_logprobs=5"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate is not taken here"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "who?"}]}, "a message has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "a" * 400}]}, "room for no answer"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template"),
    ],
)
async def test_what_would_have_no_effect_or_no_sense_is_refused_by_name(asked, told):
    sessions, session, _ = opened("5")
    async with listening(sessions) as (_, at):
        with pytest.raises(openai.BadRequestError, match=told):
            asked = {"model": "policy", "messages": [HELLO]} | asked
            await client(at, session.key).chat.completions.create(**asked)
    assert not session.conversations


async def test_a_body_that_is_none_a_path_that_is_none_and_a_model_that_is_none():
    sessions, session, _ = opened("5")
    async with listening(sessions) as (_, at), httpx.AsyncClient(base_url=at.root) as http:
        http.headers["Authorization"] = f"Bearer {session.key}"
        for body in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"model": 1}'):
            answer = await http.post("/v1/chat/completions", content=body)
            assert answer.status_code == 400 and answer.json()["error"]["message"]
        answer = await http.post("/v1/embeddings", json={})
        assert answer.status_code == 404 and "/v1/embeddings" in answer.json()["error"]["message"]
        answer = await http.post(
            "/v1/completions", content=b"x", headers={"Authorization": "Basic eA=="}
        )
        assert answer.status_code == 401
        for asked in (
            {"prompt": [7, 999]},
            {"prompt": "a", "extra_body": {"stop_token_ids": [999]}},
        ):
            with pytest.raises(openai.BadRequestError, match="has the id 999"):
                await client(at, session.key).completions.create(model="policy", **asked)
        with pytest.raises(openai.NotFoundError, match="no model policy@12"):
            await client(at, session.key).completions.create(model="policy@12", prompt="a")
        models = await client(at, session.key).models.list()
        assert [(m.id, m.model_extra["max_model_len"]) for m in models.data] == [("policy", 400)]


async def test_an_engine_that_fails_is_told_to_the_client_and_to_whoever_opened_the_session():
    sessions, session, speaker = opened("5")
    speaker.fails = EngineDied("vLLM's processes of engine 0 have ended")
    async with listening(sessions) as (_, at):
        with pytest.raises(openai.InternalServerError, match="engine 0 have ended"):
            await client(at, session.key).completions.create(model="policy", prompt="a")
    assert session.source.failures == [speaker.fails] and not session.conversations


async def test_beyond_its_queue_requests_are_refused_and_none_is_lost():
    """All at once: as many as fit are answered, the others know at once, and ask again."""
    speaker = Speaker("5")
    sessions, most = Sessions("owner"), 300
    all_of = [sessions.add(Session(Spoken(speaker))) for _ in range(most)]
    limits = httpx.Limits(max_connections=most)
    async with (
        listening(sessions, running=8, waiting=32) as (endpoint, at),
        httpx.AsyncClient(base_url=at.root, limits=limits, timeout=60) as http,
    ):

        async def ask(session):
            header = {"Authorization": f"Bearer {session.key}"}
            asked, tries = {"model": "policy", "prompt": "a"}, 0
            while True:
                answer = await http.post("/v1/completions", json=asked, headers=header)
                if answer.status_code != 429:
                    return answer.status_code, tries
                assert answer.headers["Retry-After"] == "1"
                tries += 1
                await speaker.wait.wait()
                await asyncio.sleep(0.2)

        speaker.wait.clear()
        asking = [asyncio.create_task(ask(session)) for session in all_of]
        while endpoint.admission.refused < most - 40:
            await asyncio.sleep(0.01)
        assert endpoint.admission.inside == 40 and len(speaker.asked) == 0
        speaker.wait.set()
        answers = await asyncio.gather(*asking)
    assert [status for status, _ in answers] == [200] * most
    assert sum(tries for _, tries in answers) == endpoint.admission.refused
    assert all(one.conversations["policy"].turns == 1 for one in all_of)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("text", "'<think>', which the tokenizer has and the model lacks"),
        ("chat", "'<think>', which the tokenizer has and the model lacks"),
        ("ids", "has the id 256, and there are 256 tokens here"),
    ],
)
async def test_a_token_that_the_model_lacks_is_the_clients_fault(way, told):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.model_vocab_size = 256
    sessions, session, speaker = opened("5")
    async with listening(sessions, tokenizer) as (_, at):
        agent = client(at, session.key)
        prompt = "<think>1" if way == "text" else [49, 256]
        with pytest.raises(openai.BadRequestError, match=told):
            if way == "chat":
                message = {"role": "user", "content": "<think>1"}
                await agent.chat.completions.create(model="policy", messages=[message])
            else:
                await agent.completions.create(model="policy", prompt=prompt)
    assert not speaker.asked


async def test_special_tokens_in_a_tools_answer_are_told_of_once(caplog):
    sessions, session, _ = opened(
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "3"
    )
    async with listening(sessions) as (_, at):
        agent = client(at, session.key)
        first = await agent.chat.completions.create(model="policy", messages=[HELLO], tools=[ADD])
        (called,) = first.choices[0].message.tool_calls
        answer = {"role": "tool", "tool_call_id": called.id, "content": "2<eos>"}
        messages = [HELLO, first.choices[0].message, answer]
        for history in (messages, messages[1:]):
            await agent.chat.completions.create(model="policy", messages=history, tools=[ADD])
    (told,) = [one.getMessage() for one in caplog.records if "special token" in one.getMessage()]
    assert told.startswith("an answer of the tool add holds '<eos>'")


async def test_half_a_character_is_told_back_as_it_came():
    """As JSON has it, escaped: no UTF-8 can hold it."""
    sessions, session, _ = opened("5")
    asked = {"model": "\ud800", "prompt": "2"}
    async with listening(sessions) as (_, at), httpx.AsyncClient(base_url=at.root) as http:
        http.headers["Authorization"] = f"Bearer {session.key}"
        http.headers["Content-Type"] = "application/json"
        answer = await http.post("/v1/completions", content=json.dumps(asked))
    assert answer.status_code == 404
    assert "\ud800" in answer.json()["error"]["message"]
