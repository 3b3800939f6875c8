"""The data that moves in one step. Plain numpy: no torch, Ray, Megatron or vLLM in here.

A group is all samples of one prompt; a sample is segments, each written by one author:

    tokens    p0  p1 │ r0  r1  r2 │ t0  t1 │ q0  q1        p: prompt, t: a tool's answer
    author     user  │   policy   │  tool  │ policy
    mask       0  0  │  1   1   1 │  0   0 │  1   1
    stream           │  0   1   2    3   4    5   6        per-token streams begin after the prompt

Token ids in, token ids out: nothing is decoded and tokenised again between engine and trainer.

A turn that was continued under a newer adapter version is several segments of the policy. Its
sample may be cut (`splits`): it is then trained in parts, each of which feeds all tokens before it
once more, on the routes that its own version took:

    part 1   p0  p1  r0  r1                    in the loss: r0 r1
    part 2   p0  p1  r0  r1  r2  t0  t1  q0    in the loss: r2 and what follows; splits (4,)

Shape letters: L tokens of one sample, R tokens after its prompt, n samples of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lora_moe_rl.data.scores import Details
from lora_moe_rl.data.top import Top

Author = Literal["policy", "tool", "user", "environment", "data"]
NOT_SAMPLED = -1  # the version of a token that no policy sampled


@dataclass(frozen=True)
class Answer:
    """What a row wants to be answered: its text, and its tokens with the one that ends it."""

    text: str
    token_ids: list[int]


def num_tokens(prompt: Sequence[int], answers: Sequence[Answer]) -> int:
    """Tokens of a prompt with its longest answer, if it has any."""
    return len(prompt) + max((len(answer.token_ids) for answer in answers), default=0)


@dataclass(frozen=True)
class Prompt:
    """One row of the data.

    `number` counts the prompts drawn since the run began, from 0, and is that of the prompt's
    ticket; in an eval set it is the row's. `columns` are the row's own values, given to the reward
    as keywords. `data_set` is the name of the set of data.sets that it is of, '' when there is only
    one. `answers`: the row's own, the best first, where they are what is learned from. `data_row`:
    the row's place in its data, from 0, with those that are left out; of a generator, in its pass.
    """

    number: int
    text: Any  # str, or a list of {"role", "content"}
    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    data_set: str = ""
    answers: tuple[Answer, ...] = ()
    data_row: int | None = None

    @property
    def tokens(self) -> int:
        return num_tokens(self.token_ids, self.answers)


TOO_LONG = "too long"  # what a teacher has read, where there was no room for more

STREAMS = {"token_ids": np.int32, "mask": np.bool_, "logprobs": np.float32, "versions": np.int32}


@dataclass(frozen=True)
class Segment:
    """A run of tokens by one author. All arrays have one entry a token.

    token_ids: int32. mask: bool, True for a token that may be in the loss. logprobs: float32, of
    the sampling distribution (temperature applied), 0 for a token that was not sampled. versions:
    int32, the adapter version that sampled the token, or NOT_SAMPLED. drafts: how many tokens were
    guessed while it was sampled, and how many of them taken; None where nothing guesses, or nobody
    told.
    """

    author: Author
    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    drafts: tuple[int, int] | None = None

    def __reduce__(self):
        """Pickles a segment as bytes: Ray would hand each array on as a buffer of its own, four to
        a segment, which takes ten times as long for a short sample."""
        streams = (np.asarray(getattr(self, name), dtype) for name, dtype in STREAMS.items())
        parts = (stream.tobytes() for stream in streams)
        return _segment, (self.author, self.drafts, *parts)

    @classmethod
    def given(cls, author: Author, token_ids: Sequence[int] | np.ndarray) -> Segment:
        """Tokens that nobody sampled: a prompt, a tool's answer. They are never trained."""
        n = len(token_ids)
        return cls(
            author,
            np.asarray(token_ids, dtype=np.int32),
            np.zeros(n, dtype=bool),
            np.zeros(n, dtype=np.float32),
            np.full(n, NOT_SAMPLED, dtype=np.int32),
        )

    @classmethod
    def sampled(
        cls,
        token_ids: Sequence[int] | np.ndarray,
        logprobs: np.ndarray,
        version: int,
        drafts: tuple[int, int] | None = None,
    ) -> Segment:
        """Tokens that the policy sampled at adapter `version`, all of them in the loss."""
        n = len(token_ids)
        return cls(
            "policy",
            np.asarray(token_ids, dtype=np.int32),
            np.ones(n, dtype=bool),
            np.asarray(logprobs, dtype=np.float32),
            np.full(n, version, dtype=np.int32),
            drafts,
        )

    @classmethod
    def wanted(cls, token_ids: Sequence[int] | np.ndarray) -> Segment:
        """Tokens that the data want: nobody sampled them, and all of them are in the loss."""
        n = len(token_ids)
        return replace(cls.given("data", token_ids), mask=np.ones(n, dtype=bool))


def _segment(author: Author, drafts: tuple[int, int] | None, *streams: bytes) -> Segment:
    """The segment whose arrays have these bytes. They cannot be written to."""
    return Segment(author, *map(np.frombuffer, streams, STREAMS.values()), drafts)


@dataclass(frozen=True)
class Sample:
    """One way from the prompt to the end. `segments[0]` is the prompt; `text` is what the policy
    wrote in its last turn, decoded, without special tokens, or what the data want. `messages`, of a
    sample of several turns: all that was said after the prompt, as {"role", "content"}. `splits`,
    of a sample that is trained in parts: how many of its tokens each of them feeds or predicts, but
    for the last, which has all; ascending. `prompt_routes`: equal where the prompt's tokens were
    recorded on equal routes; empty where none are recorded. `states`: of each of the policy's turns
    the state of the environment that it began in, None where the environment does not tell; empty
    where it tells of none. `asked`: what it begins with where that is not the row's prompt alone,
    a text or messages."""

    segments: tuple[Segment, ...]
    finish_reason: Literal["stop", "length", "abort"]
    text: str
    messages: tuple[dict[str, Any], ...] = ()
    splits: tuple[int, ...] = ()
    prompt_routes: bytes = b""
    states: tuple[str | None, ...] = ()
    asked: Any = None

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32 [L - R]."""
        return self.segments[0].token_ids

    @property
    def response_ids(self) -> np.ndarray:
        """int32 [R], with the token that ended it."""
        return self._stream("token_ids")

    @property
    def mask(self) -> np.ndarray:
        """bool [R], True for tokens that may be in the loss."""
        return self._stream("mask")

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [R]."""
        return self._stream("logprobs")

    @property
    def versions(self) -> np.ndarray:
        """int32 [R], NOT_SAMPLED for tokens that no policy sampled."""
        return self._stream("versions")

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [L]."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def num_tokens(self) -> int:
        """L."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        """Tokens that a policy sampled."""
        return int((self.versions != NOT_SAMPLED).sum())

    @property
    def turn_ends(self) -> np.ndarray:
        """int64 [turns], where in [R] the last token of each of the policy's turns stands. Segments
        that follow each other are one turn, which another version went on with."""
        ends: list[int] = []
        stops = np.cumsum([len(one.token_ids) for one in self.segments[1:]])
        for place, (one, stop) in enumerate(zip(self.segments[1:], stops.tolist(), strict=True)):
            if one.author != "policy":
                continue
            if ends and self.segments[place].author == "policy":
                ends.pop()
            ends.append(stop - 1)
        return np.array(ends, dtype=np.int64)

    @property
    def turn_of(self) -> np.ndarray:
        """int64 [R], the number of the policy's turn that each of its tokens is of, from 0. What it
        says of tokens of others does not count."""
        return np.searchsorted(self.turn_ends, np.arange(len(self.mask)))

    @property
    def turn_states(self) -> list[str | bytes]:
        """The state in which each of the policy's turns began, equal for equal ones: what the
        environment tells, or else the tokens that were shown since the turn before, before the
        first the prompt's. Raises ValueError for `states` of another number of turns."""
        found: list[str | bytes] = []
        shown, author = b"", ""
        for one in self.segments:
            if one.author != "policy":
                shown += np.asarray(one.token_ids, np.int32).tobytes()
            elif author != "policy":
                told = self.states[len(found)] if len(found) < len(self.states) else None
                found.append(shown if told is None else told)
                shown = b""
            author = one.author
        if self.states and len(self.states) != len(found):
            raise ValueError(
                f"states of {len(self.states)} turns, and the policy has had {len(found)}"
            )
        return found

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    def _stream(self, name: str) -> np.ndarray:
        if len(self.segments) == 2:  # of a single turn, as it is
            return getattr(self.segments[1], name)
        return self._joined[name]

    @cached_property
    def _joined(self) -> dict[str, np.ndarray]:
        parts = self.segments[1:]
        return {
            name: np.concatenate([getattr(one, name) for one in parts] or [np.zeros(0, dtype)])
            for name, dtype in STREAMS.items()
        }


@dataclass
class Group:
    """All samples of a prompt, scored.

    routes: a reference to the samples' router decisions, in their order (None: none were recorded).
    rewards: float32 [n], NaN for a sample without one. failures: one line for each sample whose
    reward failed; a failed reward is never a 0. conversations: int [n], of which conversation each
    sample is, whose samples all have its reward; None when each is one of its own. counts: what an
    environment counted, for the records. teacher: float32 [R] of each sample, a teacher's logprobs,
    0 for tokens that no policy sampled and for all of a sample that it could not score; None: there
    is no teacher. likeliest: of each sample what the teacher finds likely at its R places, where
    that is asked for; of one that it teaches nothing anything, of which nothing is learned: not NaN
    and no token twice. teacher_read: of each sample what a teacher that is the policy itself has
    read beside the prompt, in a word, '' for nothing; None: there is none. baseline: what counts of
    the reward of a greedy sample of the prompt, which is none of the samples; None: there is none,
    or none is wanted. shown_for: of a group whose samples stand for conversations of several, the
    samples of each; None: each stands for itself.
    """

    prompt: Prompt
    samples: list[Sample]
    routes: Any
    rewards: np.ndarray
    failures: list[str] = field(default_factory=list)
    details: Details = field(default_factory=Details)
    conversations: np.ndarray | None = None
    counts: dict[str, float] = field(default_factory=dict)
    teacher: list[np.ndarray] | None = None
    likeliest: list[Top] | None = None
    teacher_read: list[str] | None = None
    baseline: float | None = None
    shown_for: list[list[Sample]] | None = None

    def __post_init__(self):
        if np.shape(self.rewards) != (len(self.samples),):
            raise ValueError(
                f"prompt {self.prompt.number}: rewards of shape {np.shape(self.rewards)} for "
                f"{len(self.samples)} samples; a group has one for each, NaN where there is none"
            )

    @property
    def taught(self) -> list[bool] | None:
        """Of each sample whether a teacher that is the policy itself has read more than its prompt;
        None without one."""
        if self.teacher_read is None:
            return None
        return [word not in ("", TOO_LONG) for word in self.teacher_read]

    def asked(self, index: int) -> Any:
        """What a sample begins with, a text or messages: the row's prompt, if its environment has
        not made another of it."""
        own = self.samples[index].asked
        return self.prompt.text if own is None else own

    @property
    def ends(self) -> np.ndarray:
        """int [k], the last sample of each conversation, which stands for it: several samples of
        one conversation have one reward, which counts once."""
        if self.conversations is None:
            return np.arange(len(self.samples))
        return np.flatnonzero(np.append(self.conversations[1:] != self.conversations[:-1], True))

    @property
    def stood_for(self) -> list[list[Sample]]:
        """For each sample, those that it stands for, itself among them."""
        return self.shown_for or [[sample] for sample in self.samples]

    @property
    def versions(self) -> list[int]:
        """The versions of the tokens that a policy sampled, the oldest first."""
        every = [sample.versions for sample in self.samples]
        found = np.unique(np.concatenate(every)) if every else np.zeros(0, np.int32)
        return found[found != NOT_SAMPLED].tolist()

    @property
    def conversation_of(self) -> np.ndarray:
        """int64 [n], the place of each sample's conversation among those of the group."""
        if self.conversations is None:
            return np.arange(len(self.samples))
        return np.unique(self.conversations, return_inverse=True)[1]
