"""Between a client's messages and tokens: prompts by the model's chat template, calls of tools.

What the policy has written is never rendered where its tokens are known: only what follows it is.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from lora_moe_rl.endpoint.refusal import bad_request
from lora_moe_rl.environments.parts.special_tokens import SpecialTokens
from lora_moe_rl.environments.parts.templates import Introduced, between_turns
from lora_moe_rl.environments.parts.tool_calls import (
    CLOSE,
    OPEN,
    Call,
    Form,
    ParseError,
    arguments_of,
)
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.tokenizer import foreign_ids, model_vocab_size

Message = dict[str, Any]
log = logging.getLogger(__name__)


class Chats:
    """`calls`: how the model writes a call of a tool, as environment.calls has it. Raises
    ConfigError for a form that there is not."""

    def __init__(self, tokenizer: Any, calls: str = "json"):
        self.tokenizer, self.form = tokenizer, Form.named(calls, tokenizer)
        self._warned = False
        self._introduced = lru_cache(64)(self._introduce)
        self._special = SpecialTokens(tokenizer)
        num_ids = max(tokenizer.get_vocab().values()) + 1
        self._num_ids = min(num_ids, model_vocab_size(tokenizer) or num_ids)

    def whole(
        self, messages: Sequence[Message], tools: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[int]:
        """The tokens of a prompt, up to where the assistant begins to write."""
        self._look_at_answers(messages)
        return self.encode(self._rendered(messages, tools, kwargs))

    def after(
        self,
        last: int,
        messages: Sequence[Message],
        tools: Sequence[Any],
        kwargs: Mapping[str, Any],
        turn: Message | None = None,
    ) -> list[int]:
        """The tokens between a turn of the policy and its next: of `messages`, which came between.
        `last`: the token that ended the turn; where the template would write the same, it is not
        there twice. `turn`: as the client has it."""
        self._look_at_answers([turn or {}, *messages])
        names = [str(function.get("name")) for _, function in _calls_of(turn or {})]
        after = between_turns(
            lambda asked, begins: self._rendered(asked, tools, kwargs, begins),
            self.tokenizer.decode([last]), messages, names,
        )  # fmt: skip
        if after is None:
            raise bad_request("the model's chat template does not show what an assistant says")
        return self.encode(after)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """`special`: with what the tokenizer puts in front of a text."""
        try:
            text.encode()  # half of a surrogate pair is JSON, and no UTF-8
        except UnicodeEncodeError as error:
            raise bad_request(f"a text is no UTF-8: {error}") from error
        token_ids = self.tokenizer.encode(text, add_special_tokens=special)
        if foreign := foreign_ids(self.tokenizer, token_ids):
            token = self.tokenizer.decode(foreign[:1])
            raise bad_request(
                f"a text holds {token!r}, which the tokenizer has and the model lacks: leave it out"
            )
        return token_ids

    def checked(self, token_ids: list[int], where: str) -> list[int]:
        """Token ids that a client has sent. Raises Refused for one that is of no token, or of none
        that the model has."""
        if token_ids and max(token_ids) >= self._num_ids:
            raise bad_request(
                f"{where} has the id {max(token_ids)}, and there are {self._num_ids} tokens here"
            )
        return token_ids

    def calls_in(
        self, text: str, token_ids: Iterable[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str | None, list[Message]]:
        """What a turn says beside its calls of tools, and the calls as OpenAI's API writes them. A
        call that cannot be read is text, as is all when the client has no tools."""
        said, found = "", []
        try:
            if tools:
                whole = self.form.text_of(self.tokenizer, text, token_ids)
                said, calls = self.form.read(whole, tools)
                found = [_call(call, tools) for call in calls]
        except ParseError:
            found = []
        except Exception as error:  # of a form of one's own; the turn is in the sample all the same
            if not self._warned:
                log.warning("environment.calls raised %r on a turn, which is told as text", error)
            self._warned, found = True, []
        if not found:
            return text, []
        return said or None, found

    def _look_at_answers(self, messages: Sequence[Message]) -> None:
        """Has special tokens in tools' answers told of."""
        names: dict[Any, Any] = {}
        for message in messages:
            names |= {call.get("id"): function.get("name") for call, function in _calls_of(message)}
            if message.get("role") == "tool":
                called = names.get(message.get("tool_call_id"), message.get("name"))
                self._special.in_answer(str(called), text_of(message))

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        kwargs: Mapping[str, Any],
        begins: bool = True,
    ) -> str:
        if self.tokenizer.chat_template is None:
            raise bad_request(
                "the model's tokenizer has no chat template: set model.chat_template, or ask "
                "/v1/completions"
            )
        try:
            told = self._introduced(json.dumps(tools)) if tools else None
            shows_calls = "tool_calls" in str(self.tokenizer.chat_template)
            return (told or self.tokenizer).apply_chat_template(
                [_for_template(message, shows_calls) for message in messages],
                tokenize=False,
                add_generation_prompt=begins,
                **kwargs,
            )
        except ConfigError as error:
            raise bad_request(str(error)) from error
        except Exception as error:  # of Jinja, and what a template raises itself
            raise bad_request(f"the model's chat template refuses the messages: {error}") from error

    def _introduce(self, tools: str) -> Introduced:
        return Introduced(self.tokenizer, json.loads(tools), self.form)


def text_of(message: Message) -> str:
    """What a message says. Raises Refused for what is no text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad_request(f"a message has content of the type {kind}; only text is read here")
    return "".join(str(part.get("text") or "") for part in parts)


def canonical(message: Message) -> str:
    """Equal for messages that say the same, however a client writes them."""
    calls = [
        [call.get("id"), function.get("name"), function.get("arguments")]
        for call, function in _calls_of(message)
    ]
    said = [message["role"], text_of(message), message.get("tool_call_id"), message.get("name")]
    return json.dumps([*said, calls])


def _calls_of(message: Message) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Its calls of tools, each with its function. Raises Refused for what is none."""
    calls, found = message.get("tool_calls") or [], []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", {}) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise bad_request('tool_calls is no list of {"id": ..., "function": {...}}')
        found.append((call, function))
    return found


def _for_template(message: Message, shows_calls: bool) -> Message:
    """As templates want it: text, and arguments as objects. For a template that does not show calls
    of tools they stand in the text, in Hermes' form."""
    role = "system" if message["role"] == "developer" else message["role"]
    found = {"role": role, "content": text_of(message)}
    found |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    calls = []
    for _, function in _calls_of(message):
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError) as error:
            raise bad_request(f"the arguments of a tool call are not JSON: {error}") from error
        calls.append({"name": function.get("name"), "arguments": arguments})
    if calls and shows_calls:
        found["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    elif calls:
        found["content"] += "".join(f"{OPEN}{json.dumps(call)}{CLOSE}" for call in calls)
    return found


def _call(call: Call, tools: Sequence[Mapping[str, Any]]) -> Message:
    """Raises ParseError for a call by position that has more arguments than the tool, and for
    arguments that cannot be sent."""
    try:
        written = json.dumps(arguments_of(call, tools), ensure_ascii=False)
        (call.name + written).encode()
    except (TypeError, ValueError) as error:  # a set, as Python's form may have; half a character
        raise ParseError(f"the arguments of {call.name} are no JSON: {error}") from error
    function = {"name": call.name, "arguments": written}
    name = call.id or f"call_{uuid.uuid4().hex[:24]}"
    return {"id": name, "type": "function", "function": function}
