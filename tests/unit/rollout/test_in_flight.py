"""Requests that go on under newer versions: whatever cuts a sample, a token keeps what is its."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from versioned_model import END, SHAPE, Texts, VersionedEngine, logprob_of, route_of, token_of
from written_policy import check_bound

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.micro_batches import plan_micro_batches
from lora_moe_rl.data.packing import pack
from lora_moe_rl.environments.parts.conversation import Conversation
from lora_moe_rl.errors import RefitError, ReplayError
from lora_moe_rl.ports import Manner, Turn
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.in_flight import InFlight, Question, seed_after
from lora_moe_rl.router_replay.travel import join, send

LIMIT, SEED = 12, 40
SPEC = SimpleNamespace(shape=SimpleNamespace(vocab_size=10))
PROMPTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


class Policy:
    """A conversation's, at version 3 or newer."""

    def __init__(self, split: bool, ends: list[int], manner: Manner | None = None):
        self.in_flight, self.manner = InFlight(split), manner
        self.engine = VersionedEngine(self.in_flight, ends)

    async def sample(self, token_ids, n, turn: Turn | None = None):
        limit = LIMIT if turn is None else turn.max_tokens
        question = Question(token_ids, n, SEED, limit, 3, manner=self.manner)
        pieces = await self.in_flight.samples(self.engine.ask, question, turn)
        recorded = 0 if turn is None else turn.recorded
        samples, table = outputs.samples_and_routes(pieces, Texts(), SHAPE, recorded)
        return samples, send(table)


def check_tokens(samples) -> None:
    """Every sampled token has the logprob that its own version gave it, and versions only grow."""
    for sample in samples:
        ids, first = sample.token_ids.tolist(), len(sample.prompt_ids)
        versions = sample.versions[sample.mask]
        assert (np.diff(versions) >= 0).all()
        for place in np.flatnonzero(sample.mask):
            version = int(sample.versions[place])
            assert sample.logprobs[place] == logprob_of(version, ids[: first + place + 1])
        for segment in sample.segments[1:]:
            if segment.author == "policy":
                assert len(set(segment.versions.tolist())) == 1 and len(segment.token_ids)


def check_joined(samples, table) -> None:
    """One row a token that was fed, of the version that sampled the next one; those of a prompt and
    of a tool's answer are of the version that went on after them."""
    assert all(sample.splits == () for sample in samples)
    for sample, start in zip(samples, table.offsets[:-1], strict=True):
        ids, first = sample.token_ids.tolist(), len(sample.prompt_ids)
        for row in range(len(ids) - 1):
            later = sample.versions[max(0, row + 1 - first) :]
            version = int(later[later >= 0][0])  # of the next token that was sampled
            expected = route_of(version, ids[: row + 1])
            np.testing.assert_array_equal(table.ids[start + row], expected)


def check_split(samples, table) -> None:
    """Micro-batches: each trained token is in the loss exactly once, and all that its part feeds is
    on the routes of the version that sampled it."""
    batch = TrainBatch.from_samples(
        samples,
        [np.arange(len(one.mask), dtype=np.float32) for one in samples],
        [one.mask.astype(np.float32) for one in samples],
    )
    np.testing.assert_array_equal(batch.offsets, table.offsets)
    seen: list[tuple[int, int]] = []
    (plan,) = plan_micro_batches(range(len(samples)), batch.lengths(), 30, 1)
    for numbers in plan:
        data = pack(batch, numbers, multiple=4)
        for start, stop in pairwise(data.cu_seqlens.tolist()):
            if data.sample_of[start] >= 0:
                seen += check_part(samples, data, slice(start, stop), table)
    trained = [
        (i, len(sample.prompt_ids) + int(place))
        for i, sample in enumerate(samples)
        for place in np.flatnonzero(sample.mask)
    ]
    assert sorted(seen) == trained


def check_part(samples, data, here: slice, table) -> list[tuple[int, int]]:
    """What one part has in the loss, as (sample, place of the token)."""
    number = int(data.sample_of[here.start])
    sample, fed = samples[number], data.input_ids[here].tolist()
    first = len(sample.prompt_ids)
    assert fed == sample.token_ids[: len(fed)].tolist()
    np.testing.assert_array_equal(data.positions[here], np.arange(len(fed)))
    (version,) = set(data.versions[here][data.mask[here]].tolist())
    for row, place in zip(data.rows[here], range(len(fed)), strict=True):
        np.testing.assert_array_equal(table.ids[row], route_of(version, fed[: place + 1]))
    own = np.flatnonzero(data.mask[here]) + 1
    np.testing.assert_array_equal(data.sampled[here], data.mask[here])
    np.testing.assert_array_equal(data.labels[here][own - 1], sample.token_ids[own])
    np.testing.assert_array_equal(data.advantages[here][own - 1], own - first)
    logprobs = sample.logprobs[own - first]
    np.testing.assert_array_equal(data.rollout_logprobs[here][own - 1], logprobs)
    return [(number, int(place)) for place in own]


@settings(deadline=None, max_examples=150)
@given(
    prompt=PROMPTS,
    n=st.integers(1, 3),
    ends=st.lists(st.integers(0, 6), max_size=12),
    split=st.booleans(),
)
def test_any_cut_of_samples_keeps_what_every_tokens_version_gave_it(prompt, n, ends, split):
    policy = Policy(split, ends)
    samples, sent = asyncio.run(policy.sample(prompt, n))
    table = sent.table()
    check_bound(samples, sent)
    assert len(samples) == n and table.valid.all()
    check_tokens(samples)
    for number, sample in enumerate(samples):
        versions = np.unique(sample.versions).tolist()
        stops = np.flatnonzero(np.diff(sample.versions)) + 1 + len(prompt)
        assert sample.splits == (tuple(stops) if split else ()) and len(versions) == len(stops) + 1
        assert len(sample.mask) <= LIMIT and END not in sample.response_ids[:-1]
        assert sample.finish_reason == ("stop" if sample.response_ids[-1] == END else "length")
        assert sample.finish_reason == "stop" or len(sample.mask) == LIMIT
        check_seeds(sample, SEED + number)
    (check_split if split else check_joined)(samples, table)


def check_seeds(sample, seed: int) -> None:
    """What goes on after m tokens has a seed of m; it is sampled as one request would that begins
    there."""
    ids, first, begun = sample.token_ids.tolist(), len(sample.prompt_ids), 0
    for place, version in enumerate(sample.versions.tolist()):
        begun = place if place and version != sample.versions[place - 1] else begun
        expected = token_of(version, seed_after(seed, begun), ids[: first + place])
        assert ids[first + place] == expected


@settings(deadline=None, max_examples=100)
@given(
    prompt=PROMPTS,
    told=st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=3),
    ends=st.lists(st.integers(0, 4), max_size=6),
    split=st.booleans(),
)
def test_any_cut_of_a_conversation_keeps_what_every_tokens_version_gave_it(
    prompt, told, ends, split
):
    policy = Policy(split, ends)

    async def talk():
        one = Conversation(policy, 0, prompt, 500, 400)
        await one.ask(5)
        for tokens in told:
            one.tell("tool", tokens, "said")
            await one.ask(5)
        return one.samples()

    samples, routes = asyncio.run(talk())
    table = join(routes).table()
    check_bound(samples, join(routes))
    assert table.valid.all() and samples[0].num_sampled == samples[0].mask.sum()
    check_tokens(samples)
    (check_split if split else check_joined)(samples, table)
    if not split:
        assert sum(len(one.token_ids) - 1 for one in samples) == len(table.ids)


def test_a_sample_without_a_token_yet_is_asked_for_as_if_it_came_later():
    policy = Policy(True, [0, 0, 2])
    (sample,), _ = asyncio.run(policy.sample([5], 1))
    questions = policy.engine.asked
    assert [(one.version, one.seed) for one in questions[:3]] == [(3, SEED), (4, SEED), (5, SEED)]
    assert questions[3].seed == seed_after(SEED, 2) != SEED
    assert [one.max_tokens for one in questions] == [LIMIT, LIMIT, LIMIT, LIMIT - 2]
    assert sample.versions[:3].tolist() == [5, 5, 6] and sample.splits == (3,)


def test_samples_of_an_evaluation_are_of_its_version_whatever_is_published():
    policy = Policy(split=True, ends=[], manner=Manner(0.5))
    policy.in_flight.newest = 5
    samples, _ = asyncio.run(policy.sample([5], 2))
    assert {version for one in samples for version in one.versions.tolist()} == {3}
    assert [one.manner for one in policy.engine.asked] == [Manner(0.5)]


def two_sampled() -> list[int]:
    """A prompt after which version 3 samples two tokens at least."""
    return next(
        [token, token] for token in range(1, END) if token_of(3, SEED, [token, token]) != END
    )


def test_a_request_that_somebody_else_ends_is_no_reason_to_ask_again():
    in_flight = InFlight(split=False)
    engine = VersionedEngine(in_flight, [1])

    async def ask(question):
        answer = await engine.ask(question)
        in_flight.newest = -1
        return answer

    question = Question(two_sampled(), 1, SEED, LIMIT, 3)
    ((piece,),) = asyncio.run(in_flight.samples(ask, question))
    assert piece.output.finish_reason == "abort" and len(engine.asked) == 1


def test_more_rows_of_routes_than_were_asked_for_are_refused():
    """In the table they would be those of the next part."""
    policy = Policy(True, [1])
    question = Question(two_sampled(), 1, SEED, LIMIT, 3)
    asked = policy.in_flight.samples(policy.engine.ask, question)
    pieces = asyncio.run(asked)
    one = pieces[0][0].output
    one.routed_experts = np.concatenate([one.routed_experts, one.routed_experts[-1:]])
    with pytest.raises(ReplayError, match="routes of 3 tokens .* was to record 2 .*version 3"):
        outputs.samples_and_routes(pieces, Texts(), SHAPE)


class LateLLM:
    """vLLM that takes a request in a moment after it was asked, and answers when it is told to end.
    Keeps what it was told."""

    def __init__(self):
        self.taken: dict[str, asyncio.Future] = {}
        self.ended: list[str] = []

    async def generate(self, prompt, params, name, lora_request):
        await asyncio.sleep(0.02)
        self.taken[name] = asyncio.get_running_loop().create_future()
        await self.taken[name]
        yield name

    async def abort(self, names):
        for name in names:
            if name in self.taken:
                self.ended.append(name)
                self.taken.pop(name).set_result(None)


async def test_all_that_an_older_version_samples_is_ended_and_nothing_else(monkeypatch):
    engine = RolloutEngine(RunConfig(), "model", SPEC, 0)
    engine.llm, engine.receipts, engine.sampling = LateLLM(), {1: None, 2: None}, None
    monkeypatch.setattr(outputs, "params_of", lambda *_: None)
    monkeypatch.setattr(engine, "_lora_request", lambda version: engine.receipts[version])
    old = [asyncio.create_task(engine._ask(question(1))) for _ in range(2)]
    new = asyncio.create_task(engine._ask(question(2)))
    score = asyncio.create_task(engine._request([1], None, 1))
    held = asyncio.create_task(engine._ask(replace(question(1), manner=Manner(0.5))))
    await asyncio.sleep(0)  # all have been asked for, and vLLM has taken none
    await engine.move_on(2)
    assert all(task.done() for task in old)
    assert not new.done() and not score.done() and not held.done()
    assert engine.running == {1: 2, 2: 1} and len(engine.llm.ended) == 2
    for name in list(engine.llm.taken):
        engine.llm.taken.pop(name).set_result(None)
    await asyncio.gather(new, score, held)


def question(version: int) -> Question:
    return Question([1], 1, 0, 4, version, 0)


async def test_requests_do_not_move_on_to_a_version_that_is_not_served():
    engine = RolloutEngine(RunConfig(), "model", SPEC, 0)
    with pytest.raises(RefitError, match="asked for adapter version 2, but serves none"):
        await engine.move_on(2)
    assert engine.in_flight.newest == -1
