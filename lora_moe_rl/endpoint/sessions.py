"""Sessions: one trajectory is one identity, and what was sampled for it stays here.

A session has a key of its own and a name for URLs. Its requests are answered one after the other.
A chat whose messages begin with all messages so far, the policy's as they were answered, goes on
from the tokens of those, whatever the text would be tokenised to:

    asked   [system, user]                      p0 p1 │ r0 r1=end        the prompt is rendered
    asked   [system, user, assistant, tool]     p0 p1   r0 r1=end t0 t1 │ q0 q1=end
                           └ as answered        only the tool's message is rendered

Any other chat is rendered as a whole, and is a sample of its own, a fork (they are counted), unless
its tokens happen to go on from those of a sample. Texts and token ids go on in the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from lora_moe_rl.data.samples import Author, Sample
from lora_moe_rl.endpoint.bodies import POLICY, Asked, ChatBody, TextBody, TokenBody
from lora_moe_rl.endpoint.keys import SESSION_PREFIX
from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.endpoint.rendering import Chats, Message, canonical, text_of
from lora_moe_rl.environments.parts.conversation import Conversation, NoRoom
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.ports import Answers

REMEMBERED = 10_000  # sessions that have ended, so that their keys are told so


class Source(Protocol):
    """Who samples for sessions. `max_length`: most tokens of a sample, `max_response` most of them
    after its prompt."""

    max_length: int
    max_response: int

    def models(self) -> list[str]: ...

    def failed(self, error: LoraMoeRlError) -> None:
        """An engine that was asked has failed."""
        ...

    def policy(self, asked: Asked) -> tuple[str, Answers]:
        """Who answers, and the name by which its turns belong together. Raises Refused for a model
        that is not there, and for sampling that it does not do."""
        ...


@dataclass(frozen=True)
class Answer:
    """A turn: `sample` holds it behind the tokens that it was asked after."""

    model: str
    sample: Sample
    message: Message

    @property
    def num_prompt(self) -> int:
        return len(self.sample.prompt_ids)


class _Known(NamedTuple):
    """Text that is known as tokens, of what one model was asked and has said."""

    model: str
    text: str
    token_ids: np.ndarray


class Session:
    """`place` seeds its conversations among those of a prompt."""

    def __init__(self, source: Source, place: int = 0):
        self.name, self.key = secrets.token_hex(8), SESSION_PREFIX + secrets.token_hex(24)
        self.source, self.place = source, place
        self.conversations: dict[str, Conversation] = {}  # by the model that is asked
        self.ended: str | None = None  # why
        self.outgrown = False  # the policy's newest prompt left no room for an answer
        self.used_at = time.monotonic()
        self.lock = asyncio.Lock()
        self._asking: asyncio.Task[Any] | None = None
        self._chats: dict[bytes, np.ndarray] = {}  # tokens of all messages up to an answer
        self._texts: list[_Known] = []

    @property
    def forks(self) -> int:
        return sum(one.forks for one in self.conversations.values())

    async def chat(self, body: ChatBody, chats: Chats) -> Answer:
        tools, kwargs = body.tools or [], body.chat_template_kwargs
        async with self._open():
            model, policy = self._asked(body.asked, chats)
            marks = list(_marks([model, tools, kwargs], body.messages))
            known = next((i for i in reversed(range(len(marks))) if marks[i] in self._chats), None)
            if known is None or known + 1 == len(marks):
                new: Sequence[Message] = body.messages
                token_ids = chats.whole(new, tools, kwargs)
            else:
                before, new = self._chats[marks[known]], body.messages[known + 1 :]
                told = chats.after(int(before[-1]), new, tools, kwargs, body.messages[known])
                token_ids = [*before.tolist(), *told]
            author: Author = "tool" if new[-1]["role"] in ("tool", "function") else "user"
            content = "\n".join(text_of(message) for message in new)
            sample = await self._reply(model, policy, author, token_ids, content, body.asked)
            said, calls = chats.calls_in(sample.text, sample.response_ids, tools)
            message: Message = {"role": "assistant", "content": said}
            if calls:
                message["tool_calls"] = calls
            *_, mark = _marks([model, tools, kwargs], [*body.messages, message])
            self._chats[mark] = sample.token_ids
            return Answer(model, sample, message)

    async def text(self, body: TextBody, chats: Chats) -> Answer:
        async with self._open():
            model, policy = self._asked(body.asked, chats)
            prompt = body.prompt
            if isinstance(prompt, str):
                token_ids, content = self._tokens_of(model, prompt, chats), prompt
            else:
                token_ids = chats.checked(prompt, "the prompt")
                content = chats.tokenizer.decode(prompt)
            sample = await self._reply(model, policy, "user", token_ids, content, body.asked)
            self._texts.append(_Known(model, content + sample.text, sample.token_ids))
            return Answer(model, sample, {"role": "assistant", "content": sample.text})

    async def tokens(self, body: TokenBody, chats: Chats) -> Answer:
        async with self._open():
            model, policy = self._asked(body.asked, chats)
            ids = chats.checked(body.token_ids, "token_ids")
            content = chats.tokenizer.decode(ids)
            sample = await self._reply(model, policy, "environment", ids, content, body.asked)
            return Answer(model, sample, {"role": "assistant", "content": sample.text})

    def end(self, why: str) -> None:
        """A request that is being answered is given up."""
        self.ended = self.ended or why
        if self._asking is not None:
            self._asking.cancel()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        """Once the requests before are answered. Raises Refused when the session has ended."""
        async with self.lock:
            if self.ended is not None:
                raise gone(self.ended)
            self.used_at, self._asking = time.monotonic(), asyncio.current_task()
            try:
                yield
            finally:
                self._asking = None

    def _asked(self, asked: Asked, chats: Chats) -> tuple[str, Answers]:
        chats.checked(asked.sampling.stop_token_ids or [], "stop_token_ids")
        return self.source.policy(asked)

    def _tokens_of(self, model: str, prompt: str, chats: Chats) -> list[int]:
        """Of the model's longest text so far that it begins with, the tokens as they are."""
        known = [one for one in self._texts if one.model == model and prompt.startswith(one.text)]
        known = [one for one in known if one.text != prompt]  # asked again, and not continued
        if not known:
            return chats.encode(prompt, special=True)
        longest = max(known, key=lambda one: len(one.text))
        return [*longest.token_ids.tolist(), *chats.encode(prompt[len(longest.text) :])]

    async def _reply(
        self, model: str, policy: Answers, author: Author, token_ids: Sequence[int], content: str,
        asked: Asked,
    ) -> Sample:  # fmt: skip
        """The turn, and the tokens it was asked after as the sample's prompt."""
        source = self.source
        most = asked.max_tokens or source.max_length
        one = self.conversations.get(model)
        try:
            if one is None:
                one = Conversation(
                    policy, self.place, token_ids, source.max_length, source.max_response
                )
                sample = await one.ask(max(1, min(most, one.room)))
                self.conversations[model] = one
            else:
                one.policy = policy
                sample = await one.reply(author, token_ids, content, most)
        except NoRoom as error:
            self.outgrown = self.outgrown or model == POLICY
            raise Refused(
                400,
                "context_length_exceeded",
                f"the prompt has {len(token_ids)} tokens, and there is room for no answer within "
                f"{source.max_length} tokens, {source.max_response} of them after the first prompt",
            ) from error
        self.outgrown = self.outgrown and model != POLICY
        return sample


def gone(why: str) -> Refused:
    return Refused(410, "session_ended", f"this session has ended: {why}")


def _marks(start: Any, messages: Sequence[Message]) -> Iterator[bytes]:
    """One for each message: equal for equal messages up to there, with an equal start."""
    mark = hashlib.sha256(json.dumps(start, sort_keys=True).encode()).digest()
    for message in messages:
        mark = hashlib.sha256(mark + canonical(message).encode("utf-8", "surrogatepass")).digest()
        yield mark


class Sessions:
    """All sessions of an endpoint. `owner`: the key of who runs it, which opens sessions; None for
    an endpoint that asks nobody for a key. `shared`: who samples for requests that are of no
    session, if anybody does. `most`: sessions at a time; beyond it one that was not used for
    `idle_s` seconds is ended for another."""

    def __init__(
        self,
        owner: str | None,
        shared: Source | None = None,
        most: int = 10_000,
        idle_s: float = float("inf"),
    ):
        self.owner, self.shared, self.most, self.idle_s = owner, shared, most, idle_s
        self._by_key: dict[str, Session] = {}
        self._by_name: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # why, by key and by name

    def add(self, session: Session) -> Session:
        """Raises Refused when there are too many."""
        if len(self._by_key) >= self.most:
            oldest = min(self._by_key.values(), key=lambda one: one.used_at)
            if time.monotonic() - oldest.used_at > self.idle_s:
                self.end(oldest, f"it was not used for {self.idle_s:g} s, and others came")
        if len(self._by_key) >= self.most:
            raise Refused(
                429, "too_many_sessions", f"{self.most} sessions are open; end one first", 1
            )
        self._by_key[session.key] = self._by_name[session.name] = session
        return session

    def end(self, session: Session, why: str) -> None:
        """From now on its key is refused, with the reason."""
        session.end(why)
        self._by_key.pop(session.key, None)
        self._by_name.pop(session.name, None)
        self._ended[session.key] = self._ended[session.name] = why
        while len(self._ended) > 2 * REMEMBERED:
            self._ended.popitem(last=False)

    def is_open(self, session: Session) -> bool:
        """Whether it was added and has not ended: not that of one request alone."""
        return self._by_key.get(session.key) is session

    def is_owner(self, key: str) -> bool:
        if key.startswith(SESSION_PREFIX):
            return False
        return self.owner is None or hmac.compare_digest(key.encode(), self.owner.encode())

    def find(self, key: str, name: str | None) -> Session:
        """The session of a request with this key, and this name in its URL. Raises Refused: a key
        of another session, one that nobody has, a session that has ended or is of nobody."""
        mine = self._by_key.get(key)
        if name is None:
            if mine is not None:
                return mine
            self.check_owner(key)
            if self.shared is None:
                raise Refused(401, "no_session", "this key is of no session: claim one first")
            return Session(self.shared)  # of this request alone
        if mine is not None and mine.name != name:
            raise Refused(403, "wrong_session", f"this key is of another session than {name}")
        if mine is None:
            self.check_owner(key)
        found = self._by_name.get(name)
        if found is None:
            if name in self._ended:
                raise gone(self._ended[name])
            raise Refused(404, "no_session", f"there is no session {name}")
        return found

    def check_owner(self, key: str) -> None:
        """Raises Refused for a key that is not the owner's."""
        if key in self._ended:
            raise gone(self._ended[key])
        if not self.is_owner(key):
            raise Refused(401, "invalid_api_key", "this key is not known here")
