"""Several turns with calls, whoever answers them: what `environment=tools` and others share.

ask ──> the turn ends the conversation:   cut off (max_tokens), or without a call (done)
 ^      it calls:                         the calls are made, their answers are told
 │      a call that cannot be read:       that is told (parse_error)
 └───── again, unless                     max_turns, or what was told does not fit
                                          (context_overflow)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from lora_moe_rl.config import EnvironmentConfig, RunConfig
from lora_moe_rl.config.section import LONGEST_WAIT_S
from lora_moe_rl.data.samples import Prompt, Sample
from lora_moe_rl.environments.parts.conversation import Conversation
from lora_moe_rl.environments.parts.special_tokens import SpecialTokens
from lora_moe_rl.environments.parts.templates import Between, Introduced
from lora_moe_rl.environments.parts.tool_calls import (
    Call,
    Form,
    ParseError,
    absolute_calls,
    arguments_of,
)
from lora_moe_rl.files.importing import absolute_spec

Answering = Callable[[Call], Awaitable[tuple[bool, str]]]
Rewarding = Callable[[], Awaitable[float | None]]
Showing = Callable[[], Awaitable[str | None]]
UNKNOWN = "{} holds a token that the model does not have"


class ToolSettings(EnvironmentConfig):
    tools: tuple[str, ...] = Field(
        (), description="Typed functions with docstrings: file.py:function, module:function."
    )
    calls: str = Field(
        "json",
        description="How the model writes a call: json in <tool_call>, python, vllm:NAME (by the "
        "parser that vllm serve --tool-call-parser NAME has), or a form of your own, "
        "file.py:function.",
    )
    max_turns: int = Field(8, ge=1, description="Most turns of the policy in a conversation.")
    max_calls: int = Field(16, ge=1, description="Most calls of tools in a conversation.")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="Longest turn; null: as long as the response may still be."
    )
    # More than a sandbox has for its code, so that the model is told what that had printed.
    tool_timeout_s: float = Field(
        15, gt=0, le=LONGEST_WAIT_S, description="Longest call of a tool."
    )
    max_output_chars: int = Field(
        2000, ge=1, description="Characters of a tool's answer that the model is told."
    )
    tool_workers: int = Field(2, ge=1, description="Processes that call tools.")
    answer_role: str = Field("tool", description="The role of tools' answers in the chat template.")
    answer_in_text: str = Field(
        "\n{answer}\n", description="How an answer is told without a chat template."
    )
    mask_parse_errors: bool = Field(
        False, description="Leave turns whose call could not be read out of the loss."
    )
    retries: int = Field(
        2,
        ge=0,
        description="How often a conversation that failed, through no fault of the policy, is "
        "begun anew in a fresh environment.",
    )

    def absolute(self) -> dict[str, Any]:
        tools = [absolute_spec(tool) for tool in self.tools]
        return {"tools": tools, **absolute_calls(self.calls)}


class ToolTalk:
    """How a run's conversations with calls go. Raises ConfigError for a form of calls, or a role of
    answers, that cannot be."""

    def __init__(self, config: RunConfig, settings: ToolSettings, tokenizer: Any):
        self.settings, self.sources = settings, config.sources()
        self.tokenizer, self.form = tokenizer, Form.named(settings.calls, tokenizer)
        self.between = Between(tokenizer, settings.answer_role, settings.answer_in_text)
        self.special = SpecialTokens(tokenizer)

    async def until_the_end(
        self,
        prompt: Prompt,
        one: Conversation,
        introduced: Introduced,
        answering: Answering,
        counts: Counter[str],
        rewarding: Rewarding | None = None,
        showing: Showing | None = None,
    ) -> str:
        """Asks, and has calls answered, until one of the trusted ends, which is returned.
        `introduced` is what has told the model of its tools. `rewarding` is asked after each turn,
        when its calls are answered: what it has earned by itself. `showing` is asked before each:
        the state that it begins in."""
        calls_left = self.settings.max_calls
        while True:
            if showing is not None and (state := await showing()) is not None:
                one.in_state(state)
            turn = await one.ask(min(one.room, self.settings.max_turn_tokens or one.room))
            end, calls, answers = self._read(turn, one, introduced, counts)
            if calls:
                one.called([_written(call, introduced.schemas) for call in calls])
            for call in calls if not end else ():
                if not calls_left:
                    text = f"error: no calls are left (of {self.settings.max_calls})"
                    answers.append(_answer(call, text))
                    break
                calls_left -= 1
                counts["tool_calls"] += 1
                done, text = await answering(call)
                done, text = self._tellable(done, text)
                counts["tool_error"] += not done
                counts["special_tokens"] += self.special.in_answer(call.name, text)
                answers.append(_answer(call, text if done else f"error: {text}"))
            if rewarding is not None and (earned := await rewarding()) is not None:
                one.earn(earned)
            if end:
                return end
            token_ids = self._tokens_between(prompt, turn, introduced, answers)
            if len(token_ids) >= one.room:
                one.overflow()
                return "context_overflow"
            one.tell("tool", token_ids, *answers)

    def _read(
        self, turn: Sample, one: Conversation, introduced: Introduced, counts: Counter[str]
    ) -> tuple[str, list[Call], list[dict[str, Any]]]:
        """The end that the turn is, '' for none; its calls; and what it is told beside their
        answers."""
        if turn.truncated:
            return "max_tokens", [], []
        answers: list[dict[str, Any]] = []
        try:
            text = self.form.text_of(self.tokenizer, turn.text, turn.response_ids)
            calls = self.form.read(text, introduced.schemas)[1]
            self._check_names(calls)
        except ParseError as error:
            counts["parse_error"] += 1
            if self.settings.mask_parse_errors:
                one.leave_out_turn()
            told = self._tellable(False, str(error))[1]
            calls, answers = [], [{"role": "tool", "content": f"error: {told}"}]
        else:
            if not calls:
                return "done", [], []
        end = "max_turns" if one.turns == self.settings.max_turns else ""
        return end, calls, answers

    def _tellable(self, done: bool, text: str) -> tuple[bool, str]:
        """A tool's answer; that it cannot be told where it holds a token that the model lacks."""
        return (done, text) if self.special.known(text) else (False, UNKNOWN.format("the answer"))

    def _check_names(self, calls: Sequence[Call]) -> None:
        """Raises ParseError for a call whose name or id holds such a token: templates repeat them
        over its answer."""
        if not all(self.special.known(text) for one in calls for text in (one.name, one.id or "")):
            raise ParseError(UNKNOWN.format("a call's name"))

    def _tokens_between(
        self,
        prompt: Prompt,
        turn: Sample,
        introduced: Introduced,
        answers: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        source = self.sources[prompt.data_set]
        if isinstance(prompt.text, str) and not source.chat_template:
            return self.between.in_text([answer["content"] for answer in answers])
        own = prompt.columns.get("chat_template_kwargs") or {}
        kwargs = source.chat_template_kwargs | own
        if introduced.in_template:
            kwargs["tools"] = introduced.schemas
        return self.between.in_chat(int(turn.response_ids[-1]), answers, kwargs)


def _answer(call: Call, text: str) -> dict[str, Any]:
    """A message as TRL has it; with the id that the model gave its call."""
    answer = {"role": "tool", "name": call.name, "content": text}
    return answer if call.id is None else answer | {"tool_call_id": call.id}


def _written(call: Call, schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As TRL has it. Arguments that have no name are known by their places."""
    try:
        arguments = arguments_of(call, schemas)
    except ParseError:
        places = {str(i): value for i, value in enumerate(call.positional)}
        arguments = places | call.named
    return {"name": call.name, "arguments": arguments}
