"""A request for a chat completion, as OpenAI's API writes it, read without trust."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from lora_moe_rl.config.reward import BASE

MOST_BYTES = 16 << 20  # of a request: millions of tokens, beyond any model.max_length


class Refused(Exception):
    """A request that is not answered, with the status that says so."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class _Body(BaseModel):
    """Numbers as OpenAI bounds them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    messages: list[dict[str, JsonValue]] = Field(min_length=1)
    temperature: float | None = Field(None, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    chat_template_kwargs: dict[str, JsonValue] | None = None


TAKEN = sorted(_Body.model_fields)


@dataclass(frozen=True)
class ChatRequest:
    """`most`: new tokens; None for all there is room for. `more`: for the chat template."""

    messages: list[dict[str, Any]]
    temperature: float
    most: int | None
    seed: int | None
    more: dict[str, Any]

    @classmethod
    def read(cls, data: bytes, tokenizer: Any) -> ChatRequest:
        """Raises Refused for what is no such request: another key, a number out of its bounds,
        another model than the base, and an argument of the tokenizer itself among what is for its
        chat template: a template in the place of its own would be run."""
        try:
            body = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the request is no JSON: {error}") from error
        if isinstance(body, dict) and (unknown := sorted(body.keys() - set(TAKEN))):
            raise Refused(400, f"{unknown[0]} is not taken here; {', '.join(TAKEN)} are")
        try:
            asked = _Body.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the request"
            raise Refused(400, f"{where}: {first['msg']}") from error
        if asked.model != BASE:
            raise Refused(404, f"there is no model {asked.model}, only {BASE}")
        more = asked.chat_template_kwargs or {}
        own = inspect.signature(tokenizer.apply_chat_template).parameters
        if taken := sorted(more.keys() & own.keys()):
            raise Refused(
                400, f"chat_template_kwargs.{taken[0]} is no variable of the model's chat template"
            )
        return cls(
            asked.messages,
            1.0 if asked.temperature is None else asked.temperature,
            asked.max_completion_tokens or asked.max_tokens,
            asked.seed,
            more,
        )
