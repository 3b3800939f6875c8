"""What is asked in JSON, checked. What is not done here is refused by its name, with the way out.

A field that is not known and asks for nothing (0, false, empty) is passed over: a newer SDK sends
its own defaults. One that asks for something is refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lora_moe_rl.endpoint.bodies import told
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.backend import Adam, Lora

# {field that is not done: the way out}
NOT_DONE = {
    "project_id": "there are no projects here, leave it (TINKER_PROJECT_ID) out",
    "weights_access_token": "one key opens all that is here, leave it out",
    "age_encryption_recipients": "files are written as they are, on the server's own disk",
    "optimizer_params": "adam_params (AdamParams) are served",
    "target_prompt_logprobs": "logprobs of the prompt's own tokens are told, and the likeliest",
    "prompt_alt_tokens_k": "topk_prompt_logprobs tells of the likeliest ones",
    "record_stability_info": "take a loss that needs none; routes are recorded in any case",
}
Token = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Texts = dict[str, str]
Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]


class Body(BaseModel):
    """`about_the_client`: whatever a newer SDK tells of itself besides changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)
    about_the_client: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        known = {name: value for name, value in data.items() if name in cls.model_fields}
        for name, value in data.items():
            passed_over = name == "type" or (cls.about_the_client and name not in NOT_DONE)
            if value and name not in known and not passed_over:
                hint = NOT_DONE.get(name, "it is not known; leave it out")
                raise ValueError(f"{name}={json.dumps(value)[:100]} is not served here: {hint}")
        return known


def read[B: BaseModel](kind: type[B], content: Any) -> B:
    """Raises ServiceError for what is not of this kind."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ServiceError(told(error)) from error


class SdkBody(Body):
    """client/config: of whose SDK."""

    about_the_client = True
    sdk_version: str


class SessionBody(Body):
    """`tags` are labels for the client's own books."""

    about_the_client = True
    tags: list[str] = []
    user_metadata: Texts | None = None
    sdk_version: str
    display_name: str | None = None


class SessionId(Body):
    about_the_client = True
    session_id: str


class Reason(BaseModel):
    type: Literal["success", "errored", "interrupted"]


class FinishBody(Body):
    reason: Reason
    detail: str | None = None


class Optimizer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: str = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _adam(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type", "adamw") != "adamw":
            raise ValueError(f"type {data['type']!r} is not served here; 'adamw' is")
        return data


class LoraBody(Body):
    """`train_unembed` has no effect here; `create_session` says so."""

    rank: int = Field(ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _something(self) -> LoraBody:
        if not (self.train_mlp or self.train_attn):
            raise ValueError("nothing is left to train: set train_mlp or train_attn")
        return self

    def lora(self, seed: int) -> Lora:
        """`seed`: where the client names none."""
        given = seed if self.seed is None else self.seed
        return Lora(self.rank, given, self.train_attn, self.train_mlp)


class ModelBody(Body):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: Texts | None = None
    lora_config: LoraBody
    optimizer_config: Optimizer = Optimizer()


class ModelId(Body):
    model_id: str


class Numbered(BaseModel):
    """The body of whatever is asked of a model in its turn."""

    model_id: str
    seq_id: int = Field(ge=1)


class AdamBody(Body):
    # A step moves a weight by about the rate; far above this the forward is not finite any more.
    learning_rate: Number = Field(1e-4, ge=0, le=100)
    beta1: Number = Field(0.9, ge=0, lt=1)
    beta2: Number = Field(0.95, ge=0, lt=1)
    # In float32 not 0: a weight without a gradient would become 0 / 0.
    eps: Number = Field(1e-12, ge=1e-38)
    weight_decay: Number = Field(0.0, ge=0)
    grad_clip_norm: Number = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _decays(self) -> AdamBody:
        if self.learning_rate * self.weight_decay > 1:
            raise ValueError(
                f"learning_rate={self.learning_rate} times weight_decay={self.weight_decay} is "
                "above 1, and takes each weight past 0"
            )
        return self

    @property
    def adam(self) -> Adam:
        decay, clip = self.weight_decay, self.grad_clip_norm
        return Adam(self.learning_rate, self.beta1, self.beta2, self.eps, decay, clip)


class StepBody(Numbered, Body):
    adam_params: AdamBody


class SaveBody(Numbered, Body):
    path: str
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Texts | None = None


class ExternalBody(Numbered, Body):
    path: str
    ttl_seconds: Seconds | None = None


class SamplerBody(Numbered, Body):
    """Asks for a checkpoint, with a path, or for a sampler that lasts as long as its session,
    without one."""

    path: str | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0)
    kind: str = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: Texts | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> SamplerBody:
        if self.kind != "snapshot":
            raise ValueError(
                f"kind={self.kind!r} is not served here: a sampler keeps its weights; take "
                "kind='snapshot' and a new client after each step"
            )
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path or sampling_session_seq_id")
        if self.path is None and (self.ttl_seconds or self.user_metadata):
            raise ValueError("ttl_seconds and user_metadata are kept of a checkpoint: name a path")
        return self


class LoadBody(Body):
    """Asks for a checkpoint to be loaded in the place of a model that is there, or as a new one of
    a session."""

    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: Texts | None = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> LoadBody:
        there = (self.model_id is not None, self.seq_id is not None)
        new = (self.session_id is not None, self.model_seq_id is not None)
        if {there, new} != {(True, True), (False, False)}:
            raise ValueError("give either model_id and seq_id or session_id and model_seq_id")
        if there[0] and self.user_metadata:
            raise ValueError("user_metadata is set when a model is made")
        return self


class FetchBody(Body):
    request_id: str
    allow_metadata_only: bool = False


class PathBody(Body):
    tinker_path: str


class TtlBody(Body):
    """None: the checkpoint stays."""

    ttl_seconds: Seconds | None
