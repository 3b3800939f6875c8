"""Conversations of several turns: their tokens, masks and routes are those of one request."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_policy import END, WrittenPolicy, check_bound, logprob_of, table_of

from lora_moe_rl.data.samples import NOT_SAMPLED, Prompt
from lora_moe_rl.data.scores import Details, FunctionRewards, Scores
from lora_moe_rl.environments.parts.conversation import Conversation, finish


def assert_same_routes(got, expected) -> None:
    np.testing.assert_array_equal(got.offsets, expected.offsets)
    np.testing.assert_array_equal(got.valid, expected.valid)
    np.testing.assert_array_equal(got.ids, expected.ids)


class Rewards:
    """Two functions, `long` and `short`, for the length of a conversation's last turn; that at
    `fails` of those it is shown fails. Keeps what it was shown."""

    def __init__(self, fails: int | None = None):
        self.fails = fails

    async def score(self, prompt, samples):
        self.shown = samples
        long = np.array([len(s.text) for s in samples], np.float32)
        if failed := self.fails is not None:
            long[self.fails] = np.nan
        told = Details(
            {"long": FunctionRewards(1.0, long, int(failed)), "short": FunctionRewards(0.0, -long)},
            {self.fails: "boom"} if failed else {},
            {"said": [s.text for s in samples]},
            {"tokens": [3.0]},
        )
        return Scores(long, ["boom"] if failed else [], told)


async def talk(policy, place, prompt_ids, told, max_tokens=5) -> Conversation:
    """Asks, and tells between its questions."""
    one = Conversation(policy, place, prompt_ids, 500, 400)
    await one.ask(max_tokens)
    for tokens in told:
        one.tell("tool", tokens, "said")
        await one.ask(max_tokens)
    return one


TOLD = st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=4)


@settings(deadline=None, max_examples=40)
@given(told=st.lists(TOLD, min_size=1, max_size=3), prompt=st.lists(st.integers(1, 9), min_size=1))
def test_any_cut_into_turns_has_the_routes_and_logprobs_of_one_request(told, prompt):
    policy, rewards = WrittenPolicy(), Rewards()

    async def together():
        made = [await talk(policy, i, prompt, one) for i, one in enumerate(told)]
        return await finish(Prompt(0, "?", prompt), policy, made, rewards, {})

    group = asyncio.run(together())
    sequences = [sample.token_ids.tolist() for sample in group.samples]
    assert_same_routes(group.routes.table(), table_of(sequences))
    check_bound(group.samples, group.routes)
    assert group.routes.first_missing is None and group.routes.num_samples == len(told)
    for sample, sequence, others in zip(group.samples, sequences, told, strict=True):
        first = len(prompt)
        for place in range(first, len(sequence)):
            if sample.mask[place - first]:
                assert sample.logprobs[place - first] == np.float32(logprob_of(sequence, place))
        assert (~sample.mask).sum() == sum(map(len, others))
        np.testing.assert_array_equal(sample.mask, sample.versions != NOT_SAMPLED)


def test_the_end_of_turn_token_is_trained_and_what_others_wrote_is_not():
    policy = WrittenPolicy([[7, END], [8, 8, END]])
    one = asyncio.run(talk(policy, 0, [1, 2], [[3, 4]]))
    (sample,), _ = one.samples()
    assert sample.response_ids.tolist() == [7, END, 3, 4, 8, 8, END]
    assert sample.mask.tolist() == [True, True, False, False, True, True, True]
    assert [s.author for s in sample.segments] == ["user", "policy", "tool", "policy"]
    assert sample.text == "88" and sample.finish_reason == "stop"
    assert [m["content"] for m in sample.messages] == ["7", "said", "88"]
    # The boundary token, END at 3, is fed by the second request, which records from it on.
    assert [turn.recorded for _, turn in policy.asked] == [0, 3]


def test_what_was_told_after_the_last_turn_is_in_no_sample():
    policy = WrittenPolicy([[7, END]])
    one = asyncio.run(talk(policy, 0, [1], []))
    one.tell("tool", [5, 5], "late")
    (sample,), ((routes,),) = one.samples()
    assert sample.response_ids.tolist() == [7, END] and routes.num_rows == 2


def test_a_prompt_that_begins_with_all_tokens_so_far_goes_on_and_another_forks():
    policy, rewards = WrittenPolicy([[7, END], [8, 8, 8, END], [6, END]]), Rewards()

    async def together():
        one = Conversation(policy, 0, [1, 2], 50, 40)
        await one.ask(5)
        assert one.go_on("user", [*one.token_ids, 3], "more") and one.forks == 0
        await one.ask(5)
        assert not one.go_on("user", [1, 2, 7, 3], "shortened")
        await one.ask(5)
        other = await talk(policy, 1, [1, 2], [])
        return await finish(Prompt(0, "?", [1, 2]), policy, [one, other], rewards, {"a": 2})

    group = asyncio.run(together())
    assert [s.token_ids.tolist() for s in group.samples] == [
        [1, 2, 7, END, 3, 8, 8, 8, END],
        [1, 2, 7, 3, 6, END],
        [1, 2, 7, END],
    ]
    assert group.samples[1].mask.tolist() == [True, True]
    # Each is told what was said in it, and no other.
    assert [[m["content"] for m in sample.messages] for sample in group.samples] == [
        ["7", "more", "888"], [], [],
    ]  # fmt: skip
    assert [sample.asked for sample in group.samples] == [None, "shortened", None]
    assert group.conversations.tolist() == [0, 0, 1] and group.ends.tolist() == [1, 2]
    assert [s.text for s in rewards.shown] == ["6", "7"]
    assert group.counts == {"a": 2, "forks": 1}
    assert group.rewards.tolist() == [1, 1, 1]
    expected = table_of([s.token_ids.tolist() for s in group.samples])
    assert_same_routes(group.routes.table(), expected)


def test_one_that_forks_where_that_cannot_be_trained_on_has_failed_and_is_one_sample():
    policy, rewards = WrittenPolicy([[7, END], [8, 8, END], [6, END]]), Rewards()

    async def together():
        one = Conversation(policy, 0, [1, 2], 50, 40)
        one.no_forks = "there is a critic"
        await one.ask(5)
        one.go_on("user", [*one.token_ids, 3], "more")
        assert one.failure is None
        await one.ask(5)
        one.go_on("user", [1, 2, 7, 3], "shortened")
        assert one.failure is None  # nothing was sampled yet
        await one.ask(5)
        other = await talk(policy, 1, [1, 2], [])
        other.no_forks = one.no_forks
        return await finish(Prompt(0, "?", [1, 2]), policy, [one, other], rewards, {})

    group = asyncio.run(together())
    told = [s.token_ids.tolist() for s in group.samples]
    assert told == [[1, 2, 7, 3, 6, END], [1, 2, 7, END]]
    assert group.ends.tolist() == [0, 1]
    assert np.isnan(group.rewards).tolist() == [True, False]
    assert group.failures == ["prompt 0: it became 2 samples (a fork), and there is a critic"]
    assert_same_routes(group.routes.table(), table_of(told))


def test_a_conversation_that_failed_has_no_reward_and_says_why():
    policy, rewards = WrittenPolicy(), Rewards()

    async def together():
        made = [await talk(policy, place, [1], [[2]]) for place in range(3)]
        made[1].failure = "the tools are gone"
        return await finish(Prompt(7, "?", [1]), policy, made, rewards, {})

    group = asyncio.run(together())
    assert np.isnan(group.rewards).tolist() == [False, True, False]
    assert group.failures == ["prompt 7: the tools are gone"] and len(rewards.shown) == 2


def test_what_is_known_of_rewards_is_told_of_every_sample_of_the_conversation_that_was_scored():
    """The first conversation forks, the second has failed before it was scored, the reward of the
    third fails."""
    turns = [[6, END], [7, 7, END], [8, 8, 8, END]]
    rewards = Rewards(fails=1)

    async def together():
        made = [await talk(WrittenPolicy([said, *turns]), 0, [1], []) for said in turns]
        made[0].go_on("user", [2, 2], "anew")
        await made[0].ask(5)
        made[1].failure = "the tools are gone"
        return await finish(Prompt(7, "?", [1]), WrittenPolicy(), made, rewards, {})

    group = asyncio.run(together())
    assert group.conversations.tolist() == [0, 0, 1, 2] and group.ends.tolist() == [1, 2, 3]
    one, none = rewards.shown[0], np.nan
    np.testing.assert_array_equal(group.rewards, [len(one.text)] * 2 + [none] * 2)
    gone = "prompt 7: the tools are gone"
    assert group.failures == ["boom", gone]
    assert group.details.reasons == {2: gone, 3: "boom"}
    functions = group.details.by_function
    np.testing.assert_array_equal(functions["short"].rewards, [-len(one.text)] * 2 + [none] * 2)
    assert (functions["long"].num_failed, functions["short"].num_failed) == (2, 1)
    assert group.details.extra == {"said": [one.text, one.text, None, "888"]}
    assert group.details.metrics == {"tokens": [3.0]}


class OfTurns(Rewards):
    """1 for every sample; with `turns` it is told which turn of the first has earned it. That at
    `fails` fails, that at `none` gets no reward."""

    def __init__(self, turns=None, fails=None, none=None):
        super().__init__(fails)
        self.turns, self.none = turns, none

    async def score(self, prompt, samples):
        rewards = np.ones(len(samples), np.float32)
        for place in {self.fails, self.none} - {None}:
            rewards[place] = np.nan
        reasons = {} if self.fails is None else {self.fails: "boom"}
        by_turn = {} if self.turns is None else {0: self.turns}
        return Scores(rewards, list(reasons.values()), Details(reasons=reasons, by_turn=by_turn))


def earning(rewards, *, forks=False, at_the_end=None, failure=None):
    """Groups of two conversations of three turns of which the first earns 0.5 in the first turn and
    -0.25, in two parts, in the last; nothing is told between its second and third."""

    async def together():
        one, other = (Conversation(WrittenPolicy(), place, [1], 500, 400) for place in range(2))
        for said in (one, other):
            await said.ask(5)
            if said is one:
                one.earn(0.5)
            said.tell("tool", [2, 2], "said")
            await said.ask(5)
            said.tell("tool", [], "")
            if forks and said is one:
                one.go_on("user", [3], "anew")
            await said.ask(5)
        one.earn(-0.5)
        one.earn(0.25)
        one.own_reward, one.failure = at_the_end, failure
        return await finish(Prompt(0, "?", [1]), WrittenPolicy(), [one, other], rewards, {})

    return asyncio.run(together())


def test_what_turns_have_earned_by_themselves_counts_at_their_ends():
    group = earning(OfTurns())
    assert group.rewards.tolist() == [1.25, 1]
    # The function has given its 1 for the whole, which is earned at the end.
    assert group.details.by_turn == {0: [0.5, 0, 0.75]}
    assert len(group.samples[0].turn_ends) == 3
    assert earning(OfTurns(), at_the_end=2.0).details.by_turn == {0: [0.5, 0, 2.75]}
    assert earning(OfTurns(none=0)).details.by_turn == {0: [0.5, 0, -0.25]}


def test_it_is_added_to_what_a_reward_function_tells_of_turns():
    group = earning(OfTurns([0.25, 0.5, 0.25]), at_the_end=2.0)
    assert group.rewards.tolist() == [3.25, 1]
    assert group.details.by_turn == {0: [0.75, 0.5, 2.0]}


def test_where_there_is_no_reward_or_no_one_sample_no_turn_has_earned_anything():
    for group in (earning(OfTurns(fails=0)), earning(OfTurns(), failure="gone")):
        assert np.isnan(group.rewards).tolist() == [True, False] and not group.details.by_turn
    for rewards in (OfTurns(), OfTurns([1.0])):  # of the last sample, as a function is shown it
        group = earning(rewards, forks=True)
        assert group.rewards.tolist() == [1.25, 1.25, 1] and not group.details.by_turn


def test_a_turn_keeps_the_state_that_it_began_in():
    """The second is asked twice, and goes on; of the third nothing is said."""

    async def told(*after):
        one = Conversation(WrittenPolicy(), 0, [1], 500, 400)
        one.in_state("hall")
        await one.ask(5)
        one.in_state("yard")
        one.tell("tool", [2], "out")
        await one.ask(5)
        one.in_state("street")
        await one.ask(5)
        one.tell("tool", [3], "on")
        await one.ask(5)
        if after:
            one.in_states(after)
        (made,), _ = one.samples()
        return made

    made = asyncio.run(told())
    assert made.states == ("hall", "yard", None) and len(made.turn_ends) == 3
    assert made.turn_states[:2] == ["hall", "yard"] and isinstance(made.turn_states[2], bytes)
    assert asyncio.run(told(None, "a", "b")).states == (None, "a", "b")
    assert asyncio.run(talk(WrittenPolicy(), 0, [1], [])).samples()[0][0].states == ()


def test_of_several_samples_states_are_told_of_none():
    async def forked():
        one = await talk(WrittenPolicy(), 0, [1], [])
        one.go_on("user", [3], "anew")
        await one.ask(5)
        one.in_states(["a", "b"])
        return one.samples()[0]

    assert [one.states for one in asyncio.run(forked())] == [(), ()]


def test_a_turn_earns_finite_numbers():
    one = asyncio.run(talk(WrittenPolicy(), 0, [1], []))
    with pytest.raises(ValueError, match="turn 1 has earned nan, which is no finite number"):
        one.earn(float("nan"))


def test_a_turn_that_does_not_fit_is_refused():
    one = Conversation(WrittenPolicy(), 0, [1, 2, 3], 10, 5)
    assert one.room == 5
    one.tell("user", [1, 1], "")
    assert one.room == 3
    with pytest.raises(ValueError, match="a turn of 4 tokens does not fit; there is room for 3"):
        asyncio.run(one.ask(4))
