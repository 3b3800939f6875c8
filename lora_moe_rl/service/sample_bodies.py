"""What is asked of samplers in JSON, checked."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.backend import Ask, Facts
from lora_moe_rl.service.bodies import Body, Number, Token

MOST_SAMPLES = 4096


class SamplingSessionBody(Body):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None

    @model_validator(mode="after")
    def _something(self) -> SamplingSessionBody:
        if self.base_model is None and self.model_path is None:
            raise ValueError("give base_model or model_path")
        return self


class Chunk(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    tokens: list[Token] = []

    @field_validator("type")
    @classmethod
    def _text(cls, value: str) -> str:
        if value != "encoded_text":
            raise ValueError(f"a chunk of kind {value!r} is not served here: only text is")
        return value


class Prompt(Body):
    chunks: list[Chunk]


class ParamsBody(Body):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | list[Token] | None = None
    temperature: Number = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: Number = Field(1.0, gt=0, le=1)

    @field_validator("stop")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if value == []:
            raise ValueError(
                "[] asks for samples that go on past the model's own end, which is not done here: "
                "leave stop out, or name what is to end them"
            )
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError("an empty text would end each sample at once")
        return value


class SampleBody(Body):
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    num_samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    prompt: Prompt
    sampling_params: ParamsBody
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)

    def ask(self, facts: Facts) -> Ask:
        """Raises ServiceError for a prompt that leaves no room."""
        params = self.sampling_params
        prompt = [token for chunk in self.prompt.chunks for token in chunk.tokens]
        if self.prompt_logprobs_last_n is not None:
            if not self.prompt_logprobs:
                raise ServiceError("prompt_logprobs_last_n is of prompt_logprobs: ask for them")
            if not self.prompt_logprobs_last_n < len(prompt):
                told = f"prompt_logprobs_last_n={self.prompt_logprobs_last_n}"
                raise ServiceError(f"{told} of a prompt of {len(prompt)} tokens: ask for fewer")
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        ask = Ask(
            prompt=prompt,
            samples=self.num_samples,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.seed,
            stop=tuple(one for one in stop if isinstance(one, str)),
            stop_token_ids=tuple(one for one in stop if isinstance(one, int)),
            prompt_logprobs=bool(self.prompt_logprobs),
            top_prompt=self.topk_prompt_logprobs,
            top_sampled=self.topk_sample_logprobs,
        )
        room = facts.room(ask)
        if not 1 <= len(prompt) < room:
            raise ServiceError(
                f"the prompt has {len(prompt)} tokens; 1 to {room - 1} are served, which leave one "
                f"of {room} for a sample"
            )
        return ask
