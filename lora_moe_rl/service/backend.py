"""The port of the service: all that HTTP knows of what trains and samples.

A *model* is one adapter that is trained, named by its id; several share the frozen base and the
trainer's ranks, which hold one of them at a time. A *sampler* is one state of a model that engines
serve, named by its id too. Everything here is called in one event loop.

Shape letters: N tokens of a datum, which are fed to the model; K targets at a place; R sampled
tokens; P of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from lora_moe_rl.data.top import Top


@dataclass(frozen=True)
class Lora:
    """What a model trains. `rank`: of adapters outside the routed experts, at most `Facts.rank`;
    those of experts are smaller in the same proportion as they are in the service's own settings.
    `attention`, `mlp`: which linears have adapters that are trained."""

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True


@dataclass(frozen=True)
class Datum:
    """One sequence to learn from. tokens: int32 [N], fed; targets: int32 [N], the token whose
    logprob is wanted after each, or [N, K], the tokens. inputs: float32, as targets are, those that
    the loss reads: weights, or logprobs and advantages."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class LossCall:
    """Which loss, and its settings (`trainer/service_losses.py`)."""

    name: str
    settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Passed:
    """What a forward found: logprobs of the targets, float32 as they are of each datum, and
    metrics, whose names end in how they are put together (`loss:sum`, `replay_coverage:mean`)."""

    logprobs: list[np.ndarray]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Adam:
    """The settings of one optimizer step. `clip`: the largest norm of the gradient, 0 for none."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip: float = 0.0


@dataclass(frozen=True)
class Ask:
    """One request for samples. prompt: int [P]. `max_tokens` None: up to `Facts.max_length` with
    the prompt. `seed` None: one of the service's. `stop`: strings or token ids that end a sample,
    besides the model's own. `prompt_logprobs`: also score the prompt; `top_prompt`, `top_sampled`:
    how many of the likeliest tokens to tell at each place."""

    prompt: Sequence[int]
    samples: int
    max_tokens: int | None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: bool = False
    top_prompt: int = 0
    top_sampled: int = 0


@dataclass(frozen=True)
class Facts:
    """What clients are told of the service. `base_model`: the name that they call the base by.
    `rank`: the largest. `scores_whole`: whether engines have room for one token more than
    `max_length`."""

    base_model: str
    tokenizer: str
    max_length: int
    rank: int
    scores_whole: bool = True

    def room(self, ask: Ask) -> int:
        """The most tokens that a prompt and its samples have together. To score a sequence clients
        ask for one token after it, which they do not read."""
        only_scored = ask.prompt_logprobs and ask.max_tokens == 1
        return self.max_length + (only_scored and self.scores_whole)


@dataclass(frozen=True)
class Said:
    """One sample: int32 [R], float32 [R] (of the distribution that was sampled from), and whether
    something ended it (`stop`) or its length did (`length`)."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    top: Top | None = None


@dataclass(frozen=True)
class Sampled:
    """What one `Ask` got. prompt_logprobs: float32 [P], NaN where there is none, as at the first
    token; None where they were not asked for. top_prompt: of P places, likewise."""

    samples: list[Said]
    prompt_logprobs: np.ndarray | None = None
    top_prompt: Top | None = None
    cached: int = 0  # tokens of the prompt that the engine had already


class Backend(Protocol):
    """Errors are LoraMoeRlErrors; a ServiceError is the client's own."""

    facts: Facts

    def check(self, lora: Lora) -> None:
        """Raises ServiceError for what no model here can be."""
        ...

    async def create(self, model: str, lora: Lora) -> None:
        """A new model: A random by its seed, B zero."""
        ...

    async def forward(
        self, model: str, data: Sequence[Datum], loss: LossCall, backward: bool
    ) -> Passed:
        """Logprobs and the loss; `backward`: and adds the gradient to what the next `step` takes.
        Routes that engines recorded of the same tokens are replayed."""
        ...

    async def forget_gradient(self, model: str) -> None:
        """What `forward` has added since the last step is gone: a part of it has failed."""
        ...

    async def step(self, model: str, adam: Adam) -> dict[str, float]:
        """One optimizer step on all gradients since the last one. Returns metrics."""
        ...

    async def save(self, model: str, directory: Path) -> None:
        """Writes a checkpoint, with Adam's moments, into `directory`: in full or not at all."""
        ...

    async def load(self, model: str, directory: Path, optimizer: bool) -> Lora:
        """A model as it was saved, new or in the place of what it is; `optimizer`: Adam goes on
        from its moments. Raises ServiceError for a checkpoint that does not fit."""
        ...

    async def export(self, model: str, directory: Path) -> None:
        """Writes a PEFT adapter, as `save` writes a checkpoint."""
        ...

    async def publish(self, model: str, sampler: str) -> None:
        """The model as it is now becomes a sampler."""
        ...

    async def publish_saved(self, directory: Path, model: str, sampler: str) -> None:
        """A checkpoint becomes a sampler; `model`: the one that was saved, whose data get the
        routes of what it samples."""
        ...

    async def sample(self, sampler: str | None, ask: Ask) -> Sampled:
        """Samples by a sampler, or by the bare base (None). Given up when it is cancelled."""
        ...

    async def forget(self, model: str) -> None:
        """Nobody asks for this model any more."""
        ...

    async def forget_sampler(self, sampler: str) -> None: ...
