"""The critic: a second set of adapters and a value head, on the same frozen base as the policy.

    before the update   values of every token     critic on, policy off
    each optimizer step values -> value_loss -> gradients -> its own Adam

It is cut, summed, clipped and saved as the policy's adapters are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.attach import Adapters
from lora_moe_rl.adapters.gradients import current_layout
from lora_moe_rl.adapters.value_head import ValueHead
from lora_moe_rl.algorithms.parts.critic import CriticSettings
from lora_moe_rl.algorithms.parts.value_loss import explained_variance, moments, value_loss
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.trainer.context_parallel import gathered
from lora_moe_rl.trainer.meter import Meter
from lora_moe_rl.trainer.optimizer import AdapterOptimizer, StepResult, norm_and_rate

if TYPE_CHECKING:
    from lora_moe_rl.trainer.engine import TrainingEngine, Work

_SUMS = (
    "loss",
    "clipped",
    "value",
    "return",
    "return_squared",
    "value_error",
    "value_error_squared",
)


class Critic:
    def __init__(self, engine: TrainingEngine, settings: CriticSettings):
        """Wraps the engine's model once more, when it has the policy's adapters."""
        config, self.engine, self.settings = engine.config, engine, settings
        chunks = [getattr(chunk, "module", chunk) for chunk in engine.chunks]
        head = None
        if ps.is_pipeline_last_stage(ignore_virtual=True):
            head = ValueHead(chunks[-1].output_layer, current_layout())
        spec, seed = engine.spec.of_critic(), f"{config.seed}/critic"
        self.adapters = Adapters(chunks, spec, seed, None, config.trainer.lora_kernel, head)
        self.adapters.switch.on = False
        trainer = config.trainer.model_copy(update={"lr": settings.critic_lr or config.trainer.lr})
        total = config.trainer.steps * config.algorithm.updates_per_step
        self.optimizer = AdapterOptimizer(trainer, self.adapters, total)

    @property
    def replayed(self) -> bool:
        """Whether its forwards use the rollout's routes."""
        return self.settings.critic_routes == "rollout"

    def learns_alone(self, step: int) -> bool:
        """Whether the policy stays as it is in `step`, from 1."""
        return step <= self.settings.critic_warmup

    @contextmanager
    def on(self):
        """Inside, the model is the critic: its last stage gives values `[1, F, 1]`."""
        with self.engine.adapters.off(), self.engine.replay.unjudged():
            self.adapters.switch.on = True
            try:
                yield
            finally:
                self.adapters.switch.on = False

    def evaluate(self, works: list[Work]) -> None:
        """Adds `known["values"]`, float32 [T], to each work: what is expected before each label."""

        def keep(work: Work, output: torch.Tensor):
            work.known["values"] = _values(work, output).detach()
            return output.sum(), torch.tensor(0, dtype=torch.int), {}

        with self.on():
            self.engine.evaluate(works, keep, None, replay=self.replayed)

    def backward(self, works: list[Work], tokens: int, meter: Meter) -> None:
        """Gradients of the mean loss of `tokens` tokens, those of `works` on all ranks; a sample
        counts as often as it stands in the loss."""

        def loss(work: Work, output: torch.Tensor):
            values, data = _values(work, output), work.data
            device = values.device
            mask = on_device(torch.from_numpy(data.mask), device)
            stands = on_device(torch.from_numpy(data.mask * data.copies), device)
            old, returns = (on_device(work.known[name], device) for name in ("values", "returns"))
            each, clipped = value_loss(values, old, returns, self.settings.value_clip)
            total = (each.where(mask, 0) * stands).sum()
            found = {"loss": each.detach(), "clipped": clipped, "value": old}
            for name, stream in (found | moments(old, returns)).items():
                inside = stream.where(mask, 0) * stands
                meter.add(f"critic/{name}", inside.sum(dtype=torch.float64))
            meter.add("critic/tokens", stands.sum())
            return total, mask.sum().to(torch.int), {}

        with self.on():
            self.engine.forward_backward(works, loss, None, tokens, self.adapters, self.replayed)

    def step(self, works: list[Work], tokens: int, meter: Meter) -> StepResult:
        """One optimizer step."""
        self.backward(works, tokens, meter)
        return self.optimizer.step() if tokens else self.optimizer.passed_over()

    def metrics(self, results: Sequence[StepResult], meter: Meter) -> dict[str, float]:
        """Means over the tokens of all its steps; values are those of before the update."""
        tokens, *sums = meter.summed([f"critic/{name}" for name in ("tokens", *_SUMS)])
        every = (one / max(tokens, 1.0) for one in sums)
        means: dict[str, float] = dict(zip(_SUMS, every, strict=True))
        norm, rate = norm_and_rate(results)
        return {
            "critic/loss": means["loss"],
            "critic/clip_fraction": means["clipped"],
            "critic/value": means["value"],
            "critic/return": means["return"],
            "critic/explained_variance": explained_variance(means, tokens),
            "critic/grad_norm": norm,
            "critic/lr": rate,
            "critic/skipped": float(sum(not r.applied for r in results)),
        }


def tokens_in(batch: TrainBatch, samples: np.ndarray) -> int:
    """Tokens of these samples that have a weight, as often as the samples stand in the loss."""
    return int((batch.num_weighted() * batch.copies)[samples].sum())


def _values(work: Work, output: torch.Tensor) -> torch.Tensor:
    """[T] of `[1, F / cp, 1]`."""
    fed_at = on_device(torch.from_numpy(work.data.fed_at), output.device)
    return gathered(output.flatten(), ps.get_context_parallel_group()).index_select(0, fed_at)
