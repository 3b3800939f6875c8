"""A conversation in the making: the policy is asked in turns, others answer, samples come of it.

    ask    one more request with all tokens so far: its answer is a segment of the policy
    tell   tokens of a tool, a user or the environment: a segment that is never trained
    go_on  the next prompt as a whole: what it has beyond all tokens so far is told; one that does
           not begin with exactly those of any sample begins a new sample, a fork
    reply  both: the policy's turn after such a prompt, or nothing has been said

What the policy sampled stays token ids. A request records the rows of routes that none before it
could; the last token of a turn was not fed by the request that sampled it:

    token      p0  p1  r0  r1=end  t0  t1  q0  q1=end
    row         0   1   2    3      4   5   6    -
    request     1   1   1    2      2   2   2
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lora_moe_rl.data.samples import Author, Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import Played, Scores
from lora_moe_rl.ports import Answers, Policy, Ref, Rewards, Turn


class NoRoom(ValueError):
    """Raised for a turn that does not fit."""


@dataclass
class _Open:
    """A sample that is not at its end. `routes`: of its requests, which recorded `rows` rows."""

    segments: list[Segment]
    routes: list[Ref] = field(default_factory=list)
    rows: int = 0
    recorded_by: int | None = None  # the version of the newest of them
    splits: tuple[int, ...] = ()
    prompt_routes: bytes = b""
    last: Sample | None = None  # the policy's newest turn
    messages: list[dict[str, Any]] = field(default_factory=list)  # what was said after its prompt
    asked: Any = None  # its prompt, where that is not the row's
    earned: dict[int, float] = field(default_factory=dict)  # by the number of the turn
    states: dict[int, str | None] = field(default_factory=dict)  # in which turns began, likewise

    @property
    def token_ids(self) -> np.ndarray:
        return np.concatenate([segment.token_ids for segment in self.segments])

    @property
    def num_turns(self) -> int:
        """The policy's turns, as `Sample.turn_ends` counts them."""
        return len(Sample(tuple(self.segments), "stop", "").turn_ends)


class Conversation:
    """The one at `place` among those of a prompt. `max_length`: most tokens of a sample;
    `max_response`: most of them after its prompt."""

    def __init__(
        self,
        policy: Answers,
        place: int,
        prompt_ids: Sequence[int],
        max_length: int,
        max_response: int,
    ):
        self.policy, self.place = policy, place
        self.max_length, self.max_response = max_length, max_response
        self.turns = 0
        self._failure: str | None = None
        self.no_forks: str | None = None  # why more than one sample of it cannot be trained on
        self.own_reward: float | None = None  # what its environment gave it at its end
        self.played: Played | None = None  # what reward functions are shown of its environment
        self._state: str | None = None  # in which the next turn begins
        self.prompt_ids = prompt_ids
        self.begin(prompt_ids)

    def begin(self, prompt_ids: Sequence[int], asked: Any = None) -> None:
        """It begins with this prompt; nothing may have been asked yet. `asked`: its text or
        messages where they are not the row's."""
        assert not self.turns
        self._samples = [_Open([Segment.given("user", prompt_ids)], asked=asked)]

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far of the sample that is being made."""
        return self._samples[-1].token_ids.tolist()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was said after the prompt of the sample that is being made, as reward functions are
        told of it."""
        return self._samples[-1].messages

    @property
    def begun_with(self) -> list[int]:
        """The tokens of its first prompt, with what its environment had to add."""
        return self._samples[0].segments[0].token_ids.tolist()

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        now = self._samples[-1]
        length = len(now.token_ids)
        response = length - len(now.segments[0].token_ids)
        return min(self.max_length - length, self.max_response - response)

    @property
    def failure(self) -> str | None:
        """Why it has no reward, whatever was said."""
        made = sum(one.last is not None for one in self._samples)
        if self._failure is None and made > 1 and self.no_forks is not None:
            return f"it became {made} samples (a fork), and {self.no_forks}"
        return self._failure

    @failure.setter
    def failure(self, why: str | None) -> None:
        self._failure = why

    @property
    def forks(self) -> int:
        return len(self._samples) - 1

    @property
    def own_rewards(self) -> float | None:
        """All that its environment gave it by itself, at its end and for turns; None: nothing."""
        earned = [reward for one in self._samples for reward in one.earned.values()]
        if not earned:
            return self.own_reward
        return sum(earned) + (self.own_reward or 0.0)

    @property
    def num_turns(self) -> int:
        """The policy's turns of all its samples, as rewards are told of them."""
        return sum(one.num_turns for one in self._samples)

    @property
    def earned(self) -> list[float] | None:
        """What each turn has earned by itself, where it is told of any; None, too, of a
        conversation that became several samples."""
        if self.forks or not (now := self._samples[-1]).earned:
            return None
        return [now.earned.get(turn, 0.0) for turn in range(now.num_turns)]

    async def ask(self, max_tokens: int) -> Sample:
        """The policy's next turn, of up to `max_tokens` tokens. Raises NoRoom when they do not
        fit."""
        if not 1 <= max_tokens <= self.room:
            raise NoRoom(f"a turn of {max_tokens} tokens does not fit; there is room for "
                         f"{self.room}")  # fmt: skip
        now = self._samples[-1]
        turn = Turn(self.place, self.turns, now.rows, max_tokens, now.recorded_by)
        (answer,), routes = await self.policy.sample(now.token_ids.tolist(), 1, turn)
        now.segments.extend(answer.segments[1:])
        now.routes.append(routes)
        now.rows, now.last = len(now.token_ids) - 1, answer
        now.recorded_by = int(answer.versions[-1])
        now.splits += answer.splits
        if len(now.routes) == 1:
            now.prompt_routes = answer.prompt_routes
        if self._state is not None:  # what is still the same turn keeps that in which it began
            now.states.setdefault(now.num_turns - 1, self._state)
            self._state = None
        self.turns += 1
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def earn(self, reward: float) -> None:
        """The policy's newest turn has earned this, beside what is given for the whole. Raises
        ValueError for what is no finite number."""
        if not math.isfinite(reward):
            raise ValueError(f"turn {self.turns} has earned {reward}, which is no finite number")
        now = self._samples[-1]
        turn = now.num_turns - 1
        assert turn >= 0, "nothing was asked yet"
        now.earned[turn] = now.earned.get(turn, 0.0) + reward

    def in_state(self, state: str) -> None:
        """The policy's next turn begins in this state of the environment. One of which nothing is
        said begins in what was told before it."""
        self._state = state

    def in_states(self, states: Sequence[str | None]) -> None:
        """The same of all turns so far, None where nothing is said; not of a conversation that
        became several samples, of which no turn is told apart."""
        if not self.forks:
            self._samples[-1].states = dict(enumerate(states))

    def tell(
        self, author: Author, token_ids: Sequence[int], *messages: dict[str, Any] | str
    ) -> None:
        """Tokens that `author` wrote, and the messages that they stand for; one of that author
        where it is given as a text."""
        self._samples[-1].segments.append(Segment.given(author, token_ids))
        for one in messages:
            self.messages.append({"role": author, "content": one} if isinstance(one, str) else one)

    def called(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """The policy's newest turn has called tools: each a `name` and its `arguments`."""
        told = [{"type": "function", "function": dict(call)} for call in calls]
        self.messages[-1]["tool_calls"] = told

    def go_on(self, author: Author, token_ids: Sequence[int], content: str) -> bool:
        """The next prompt as a whole, in which `content` is new. False when it began a new sample,
        since it does not begin with exactly the tokens of one so far; that one is then the last."""
        whole = np.asarray(token_ids, dtype=np.int32)
        for place in reversed(range(len(self._samples))):
            before = self._samples[place].token_ids
            if np.array_equal(whole[: len(before)], before):
                self._samples.append(self._samples.pop(place))
                if len(whole) > len(before):
                    self.tell(author, token_ids[len(before) :], content)
                return True
        if self._samples[-1].last is None:  # nothing was sampled from it
            self._samples.pop()
        self._samples.append(_Open([Segment.given("user", token_ids)], asked=content))
        return False

    def leave_out_turn(self) -> None:
        """No token of the policy's newest turn is in the loss."""
        segments = self._samples[-1].segments
        place = len(segments) - 1
        while segments[place].author == "policy":
            one = segments[place]
            segments[place] = replace(one, mask=np.zeros_like(one.mask))
            place -= 1

    async def reply(
        self, author: Author, token_ids: Sequence[int], content: str, max_tokens: int
    ) -> Sample:
        """The policy's turn after the next prompt as a whole, of up to `max_tokens` tokens and as
        many as there is room for. When there is none of it (NoRoom, an engine that fails, whoever
        waits gives up), nothing has been told either."""
        before = [(one, len(one.segments), len(one.messages)) for one in self._samples]
        try:
            self.go_on(author, token_ids, content)
            return await self.ask(max(1, min(max_tokens, self.room)))
        except BaseException:
            self._samples = [one for one, *_ in before]
            for one, length, said in before:
                del one.segments[length:]
                del one.messages[said:]
            raise

    def overflow(self) -> None:
        """The conversation ends, since what comes next does not fit: its sample was cut off."""
        now = self._samples[-1]
        assert now.last is not None
        now.last = replace(now.last, finish_reason="length")

    def samples(self) -> tuple[list[Sample], list[list[Ref]]]:
        """The samples that came of it, and the routes of the requests of each. What was told after
        the policy's last turn is in none: no request was fed it."""
        found, routes = [], []
        for one in self._samples:
            if one.last is None:
                continue
            segments = list(one.segments)
            while segments[-1].author != "policy":
                segments.pop()
            last = one.last
            alone = len(one.messages) == 1 and "tool_calls" not in one.messages[0]
            states = [one.states.get(turn) for turn in range(one.num_turns if one.states else 0)]
            found.append(
                replace(
                    last,
                    segments=tuple(segments),
                    messages=() if alone else tuple(one.messages),
                    splits=one.splits,
                    prompt_routes=one.prompt_routes,
                    states=tuple(states),
                    asked=one.asked,
                )
            )
            routes.append(one.routes)
        if self.no_forks is not None:  # then it has failed, and its last sample stands for it
            return found[-1:], routes[-1:]
        return found, routes


async def together[T](talks: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of a prompt's conversations at the same time; when one raises, the others are ended."""
    tasks = [asyncio.create_task(talk) for talk in talks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish(
    prompt: Prompt,
    policy: Policy,
    conversations: Sequence[Conversation],
    rewards: Rewards,
    counts: Mapping[str, float],
) -> Group:
    """The group of conversations that have ended. Each has one reward, of its last sample, which
    all its samples get; one with a `failure` has none, and a line that says why. What the
    environment gave by itself is added to what the reward functions gave, turn by turn. Of several
    samples of a conversation no turn is told of: what functions say is of the last."""
    made = [one.samples() for one in conversations]
    whole = [i for i, one in enumerate(conversations) if one.failure is None]
    played = [one for i in whole if (one := conversations[i].played) is not None]
    shown = (played,) if played else ()
    scores = await rewards.score(prompt, [made[i][0][-1] for i in whole], *shown)
    scores = _with_own(scores, [conversations[i] for i in whole])
    failed = {
        i: f"prompt {prompt.number}: {one.failure}"
        for i, one in enumerate(conversations)
        if one.failure is not None
    }
    number = np.repeat(np.arange(len(made)), [len(samples) for samples, _ in made])
    return Group(
        prompt,
        [sample for samples, _ in made for sample in samples],
        policy.join([turns for _, routes in made for turns in routes]),
        *_with_failed(scores, failed, len(conversations)).at(number),
        number,
        {**counts, "forks": sum(one.forks for one in conversations)},
    )


def _with_own(scores: Scores, conversations: Sequence[Conversation]) -> Scores:
    """With the rewards of the environment, where there are any. A reward function that does not
    apply adds nothing to them; where one has failed there is still no reward."""
    rewards, by_turn = scores.rewards.copy(), dict(scores.details.by_turn)
    for i, one in enumerate(conversations):
        told = by_turn.pop(i, None)
        if i in scores.details.reasons:
            continue
        given = 0.0 if np.isnan(rewards[i]) else float(rewards[i])
        own, earned = one.own_rewards, one.earned
        if own is not None:
            rewards[i] = own + given
        if one.forks or (told is None and earned is None):
            continue
        turns = np.zeros(len(told or earned or ()))
        turns += 0.0 if earned is None else earned
        turns[-1] += one.own_reward or 0.0
        if told is None:
            turns[-1] += given
        else:
            turns += told
        by_turn[i] = turns.tolist()
    return scores._replace(rewards=rewards, details=replace(scores.details, by_turn=by_turn))


def _with_failed(scores: Scores, failed: Mapping[int, str], count: int) -> Scores:
    """The scores of `count` conversations, from those of all but the ones that have failed before
    any reward function was asked, which is as if each function had. `failed`: why, by place."""
    asked = np.array([i not in failed for i in range(count)])
    found = scores.at(np.where(asked, np.cumsum(asked) - 1, -1))
    for name, one in found.details.by_function.items():
        num_failed = one.num_failed + len(failed)
        found.details.by_function[name] = replace(one, num_failed=num_failed)
    found.details.reasons.update(failed)
    return found._replace(failures=[*scores.failures, *failed.values()])
