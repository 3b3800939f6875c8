"""A backend of the service by hand: what it finds follows from the tokens by a formula, so that
what comes through the wire can be checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.errors import EngineDied, ServiceError
from lora_moe_rl.service.backend import (
    Adam,
    Ask,
    Datum,
    Facts,
    Lora,
    LossCall,
    Passed,
    Said,
    Sampled,
    Top,
)

BASE = "tiny/moe"
LOSSES = ("cross_entropy", "importance_sampling")
DEADLY = 666  # the token that no engine survives, and the seed


def logprobs_of(tokens: Sequence[int], targets: Any, weight: float) -> np.ndarray:
    """float32, [N] or [N, K] as targets are."""
    targets = np.asarray(targets, np.float32)
    along = (-1, *(1 for _ in targets.shape[1:]))
    places = np.arange(len(tokens), dtype=np.float32).reshape(along)
    state = np.float32(0.1) * np.asarray(tokens, np.float32).reshape(along) + np.float32(weight)
    return -(state + targets / 7 + places / 11) / np.float32(3)


class PretendedBackend:
    """`weights`: of each model, the sum of all steps. `hold`: until it is set, forwards wait."""

    def __init__(self, rank: int = 32):
        self.facts = Facts(BASE, "tiny/tokenizer", max_length=64, rank=rank)
        self.calls: list[tuple[Any, ...]] = []
        self.loras: dict[str, Lora] = {}
        self.weights: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.moments: dict[str, float] = {}
        self.samplers: dict[str, float] = {}
        self.hold: asyncio.Event | None = None
        self.given_up = 0

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def check(self, lora: Lora) -> None:
        if lora.rank % 2:
            raise ServiceError(f"rank={lora.rank} is odd")

    async def create(self, model: str, lora: Lora) -> None:
        self.calls.append(("create", model, lora))
        if lora.seed == DEADLY:
            raise EngineDied("the ranks have ended")
        self._put(model, lora, 0.0, 0.0)

    def _put(self, model: str, lora: Lora, weight: float, moment: float) -> None:
        self.loras[model], self.weights[model] = lora, weight
        self.moments[model], self.gradients[model] = moment, 0.0

    async def forward(
        self, model: str, data: Sequence[Datum], loss: LossCall, backward: bool
    ) -> Passed:
        self.calls.append(("forward", model, data, loss, backward))
        if self.hold is not None:
            await self.hold.wait()
        if loss.name not in LOSSES:
            raise ServiceError(f"loss_fn={loss.name!r} is not served; {', '.join(LOSSES)} are")
        if any(DEADLY in datum.tokens for datum in data):
            raise EngineDied("the ranks have ended")
        found = [logprobs_of(d.tokens, d.targets, self.weights[model]) for d in data]
        weights = [d.inputs.get("weights", np.ones(d.targets.shape, np.float32)) for d in data]
        total = -sum(float((one * w).sum()) for one, w in zip(found, weights, strict=True))
        if backward:
            self.gradients[model] += sum(float(w.sum()) for w in weights)
        return Passed(found, {"loss:sum": total, "tokens:mean": float(len(found[0]))})

    async def forget_gradient(self, model: str) -> None:
        self.calls.append(("forget_gradient", model))
        self.gradients[model] = 0.0

    async def step(self, model: str, adam: Adam) -> dict[str, float]:
        self.calls.append(("step", model, adam))
        gradient, self.gradients[model] = self.gradients[model], 0.0
        self.moments[model] = adam.beta1 * self.moments[model] + gradient
        self.weights[model] += adam.lr * self.moments[model]
        return {"grad_norm": abs(gradient)}

    async def save(self, model: str, directory: Path) -> None:
        self.calls.append(("save", model))
        lora = self.loras[model]
        told = {"weight": self.weights[model], "rank": lora.rank, "seed": lora.seed}
        told["moment"] = self.moments[model]
        directory.mkdir()
        (directory / "model.json").write_text(json.dumps(told))

    async def load(self, model: str, directory: Path, optimizer: bool) -> Lora:
        self.calls.append(("load", model, optimizer))
        told = json.loads((directory / "model.json").read_text())
        lora = Lora(told["rank"], told["seed"])
        self._put(model, lora, told["weight"], told["moment"] if optimizer else 0.0)
        return lora

    async def export(self, model: str, directory: Path) -> None:
        directory.mkdir()
        (directory / "adapter_model.json").write_text(json.dumps(self.weights[model]))
        (directory / "more").mkdir()
        (directory / "more/of it.txt").write_text("more")

    async def publish(self, model: str, sampler: str) -> None:
        self.samplers[sampler] = self.weights[model]

    async def publish_saved(self, directory: Path, model: str, sampler: str) -> None:
        self.calls.append(("publish_saved", sampler))
        told = json.loads((directory / "model.json").read_text())
        self.samplers[sampler] = told["weight"]

    async def sample(self, sampler: str | None, ask: Ask) -> Sampled:
        """Each sample counts up from the prompt's last token; the ith begins i later."""
        self.calls.append(("sample", sampler, ask))
        if ask.max_tokens is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        weight = 0.0 if sampler is None else self.samplers[sampler]
        prompt = list(ask.prompt)
        samples = [self._said(prompt[-1] + i, ask, weight) for i in range(ask.samples)]
        scored = top = None
        if ask.prompt_logprobs:
            scored = np.full(len(prompt), np.nan, np.float32)
            scored[1:] = logprobs_of(prompt[:-1], prompt[1:], weight)
        if ask.top_prompt:
            top = self._top(len(prompt), ask.top_prompt)
            top.logprobs[0] = np.nan
        return Sampled(samples, scored, top, cached=len(prompt) // 2)

    def _said(self, start: int, ask: Ask, weight: float) -> Said:
        assert ask.max_tokens is not None
        ids = np.arange(start + 1, start + 1 + ask.max_tokens, dtype=np.int32)
        before = ids - 1
        top = self._top(len(ids), ask.top_sampled) if ask.top_sampled else None
        stopped = bool(set(ids.tolist()) & set(ask.stop_token_ids))
        reason = "stop" if stopped else "length"
        return Said(ids, logprobs_of(before.tolist(), ids.tolist(), weight), reason, top)

    @staticmethod
    def _top(places: int, k: int) -> Top:
        ids = np.arange(places * k, dtype=np.int32).reshape(places, k)
        return Top(ids, -ids.astype(np.float32) / 13)

    async def forget(self, model: str) -> None:
        self.calls.append(("forget", model))
        del self.weights[model]

    async def forget_sampler(self, sampler: str) -> None:
        self.calls.append(("forget_sampler", sampler))
        self.samplers.pop(sampler, None)
