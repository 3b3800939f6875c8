"""Megatron's Adam over the adapters alone, with a skip that all ranks agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from lora_moe_rl.config import TrainerConfig


@dataclass(frozen=True)
class StepResult:
    """`grad_norm` is that of the whole adapter before clipping."""

    applied: bool
    grad_norm: float
    lr: float


class AdapterOptimizer:
    """The optimizer of one rank. `steps` counts applied steps."""

    def __init__(self, config: TrainerConfig, model: torch.nn.Module):
        self.config = config
        self.steps = 0
        options = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            params_dtype=torch.float32,
            use_distributed_optimizer=False,
        )
        self.megatron = get_megatron_optimizer(options, [model])

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def step(self) -> StepResult:
        """Clips and steps, unless the gradient norm is NaN or infinite on any rank."""
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm() or 0.0)
        finite = torch.tensor([float(math.isfinite(norm))])
        if dist.get_backend() == "nccl":
            finite = finite.cuda()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        lr = self._lr()
        if not finite.item():
            return StepResult(False, norm, lr)
        for group in self.megatron.param_groups:
            group["lr"] = lr
        self._clip(norm)
        self.megatron.step_with_ready_grads()
        self.steps += 1
        return StepResult(True, norm, lr)

    def _lr(self) -> float:
        if self.config.warmup_steps:
            return self.config.lr * min(1.0, (self.steps + 1) / self.config.warmup_steps)
        return self.config.lr

    def _clip(self, norm: float) -> None:
        if self.config.clip_grad and norm > self.config.clip_grad:
            scale = self.config.clip_grad / (norm + 1e-6)
            for parameter in self.parameters():
                parameter.grad.mul_(scale)

    def parameters(self):
        for group in self.megatron.param_groups:
            yield from group["params"]

    def state(self, key: str):
        """A function from a parameter to its Adam state `key` (exp_avg or exp_avg_sq): a tensor of
        the parameter's shape, zeros before the first step."""

        def of(parameter: torch.nn.Parameter) -> torch.Tensor:
            for optimizer in _inner_optimizers(self.megatron):
                if key in optimizer.state.get(parameter, {}):
                    return optimizer.state[parameter][key]
            return torch.zeros_like(parameter)

        return of

    def restore(self, steps: int) -> None:
        """Makes every state exist, at `steps` steps, so that its tensors can be written."""
        self.steps = steps
        for optimizer in _inner_optimizers(self.megatron):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(float(steps)),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
                if "step" in group:  # FusedAdam counts by group
                    group["step"] = steps


def _inner_optimizers(megatron) -> list[torch.optim.Optimizer]:
    parts = getattr(megatron, "chained_optimizers", [megatron])
    return [part.optimizer for part in parts if part.optimizer is not None]
