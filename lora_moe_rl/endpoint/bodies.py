"""What is asked: request bodies, checked. What would have no effect here is refused by its name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lora_moe_rl.endpoint.refusal import bad_request
from lora_moe_rl.ports import Manner

# Taken only with these values, which ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "stop": (None, "", []),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "skip_special_tokens": (None, True, False),
    "features": (None,),
    "routed_experts_prompt_start": (None,),
}
HINTS = {
    "n": "ask several times: each answer is a sample of its own",
    "stop": "texts end no turn; name tokens in stop_token_ids",
    "routed_experts_prompt_start": "routes stay on the server",
}
# About the client's own books: they change no answer.
ABOUT_THE_CLIENT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls", "priority",
)  # fmt: skip
NOT_FOR_TEMPLATES = ("chat_template", "tools", "tokenize", "add_generation_prompt")
Token = Annotated[int, Field(ge=0)]
BASE, POLICY = "base", "policy"  # names of models


def version_in(model: str) -> int | None:
    """The 12 of policy@12; None for what names no version."""
    found = re.fullmatch(rf"{POLICY}@(0|[1-9][0-9]{{0,17}})", model)
    return None if found is None else int(found[1])


class Sampling(BaseModel):
    """How the next turn is sampled; None: as whoever serves it has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=0, lt=2**32)
    max_tokens: int | None = Field(None, ge=1)
    stop_token_ids: list[Token] | None = None

    @property
    def manner(self) -> Manner:
        """What is not said is as in a plain sample of the model."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        given = {name: value for name, value in given.items() if value is not None}
        return Manner(**given, stop_token_ids=tuple(self.stop_token_ids or ()))

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        data = {name: value for name, value in data.items() if name not in ABOUT_THE_CLIENT}
        for name in [name for name in NEUTRAL if name in data and name not in cls.model_fields]:
            value = data.pop(name)
            if value not in NEUTRAL[name]:
                hint = HINTS.get(name, "leave it out")
                raise ValueError(f"{name}={json.dumps(value)} is not served here: {hint}")
        return data


@dataclass(frozen=True)
class Asked:
    """What all three ways of asking have in common."""

    model: str
    sampling: Sampling
    cache_salt: str | None = None

    @property
    def max_tokens(self) -> int | None:
        return self.sampling.max_tokens


class _Body(Sampling):
    model: str
    cache_salt: str | None = Field(None, min_length=1)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def asked(self) -> Asked:
        found = {name: getattr(self, name) for name in Sampling.model_fields}
        return Asked(self.model, Sampling(**found), self.cache_salt)

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(_Body):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _only_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in NOT_FOR_TEMPLATES if name in value]:
            raise ValueError(f"{taken[0]} is not for a client to set")
        return value

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        for message in self.messages:
            if not isinstance(message.get("role"), str):
                raise ValueError("a message has no role")
        for tool in self.tools or []:
            if not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
                raise ValueError("a tool is no function with a name")
        return self


class TextBody(_Body):
    """/v1/completions. A prompt is a text, or token ids."""

    prompt: str | list[Token]
    logprobs: int | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.prompt:
            raise ValueError("the prompt is empty")
        return self


class TokenSampling(Sampling):
    """How /inference/v1/generate samples; logprobs of the sampled tokens come in any case."""

    logprobs: int | None = Field(None, ge=0, le=1)


class TokenBody(BaseModel):
    """/inference/v1/generate: token ids in, token ids out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    token_ids: list[Token] = Field(min_length=1)
    sampling_params: TokenSampling = TokenSampling()
    cache_salt: str | None = Field(None, min_length=1)
    stream: Literal[False] | None = None
    priority: int | None = None
    features: None = None

    @property
    def asked(self) -> Asked:
        return Asked(self.model, self.sampling_params, self.cache_salt)


def read[Body: BaseModel](kind: type[Body], content: bytes) -> Body:
    """A request's body. Raises Refused for what is no JSON, and what is not of this kind."""
    try:
        return kind.model_validate(json.loads(content))
    except ValidationError as error:
        raise bad_request(told(error)) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from error


def told(error: ValidationError) -> str:
    """All that is wrong, and where."""
    return "; ".join(_told(one) for one in error.errors(include_url=False))


def _told(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{where} is not taken here"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
