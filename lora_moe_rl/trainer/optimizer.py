"""Adam over the adapters alone, with a skip that all ranks agree on.

The adapters of a rank are small (a 1T model's at rank 32 are 80 M parameters a rank on 512 GPUs),
so that neither their gradients nor Adam's moments need to be sharded further.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lora_moe_rl.adapters.attach import Adapters
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.files.trainer_state import Done
from lora_moe_rl.trainer.host_moments import MOMENTS, HostMoments, host_zeros


@dataclass(frozen=True)
class StepResult:
    """`applied`: False when it was skipped. `grad_norm` is that of the whole adapter before
    clipping, `lr` that of A. `streamed`: seconds of Adam with moments that come from the host."""

    applied: bool
    grad_norm: float
    lr: float
    streamed: float = 0.0


EMPTY = StepResult(False, 0.0, 0.0)  # there was no token in the loss


def norm_and_rate(results: Sequence[StepResult]) -> tuple[float, float]:
    """The mean norm of the optimizer steps that had tokens, and the last one's learning rate; 0
    where none had any."""
    made = [result for result in results if result is not EMPTY] or [EMPTY]
    return float(np.mean([result.grad_norm for result in made])), made[-1].lr


def learning_rate(config: TrainerConfig, done: int, total: int) -> float:
    """The learning rate of the optimizer step after `done` of `total`. Those that were skipped for
    a loss or gradient that is not finite do not count."""
    if done < config.warmup_steps:
        return config.lr * (done + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    past = min(1.0, (done - config.warmup_steps) / max(1, total - config.warmup_steps))
    left = 1 - past if config.lr_schedule == "linear" else (1 + math.cos(math.pi * past)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left


def _groups(
    config: TrainerConfig, adapters: Adapters, still: Container[torch.Tensor]
) -> list[dict[str, Any]]:
    """Parameters by the ratio of their learning rate to trainer.lr, without those of `still`."""
    if config.lr_ratio_B == 1:
        groups = [(adapters.parameters(), 1.0)]
    else:
        groups = [
            (adapters.parameters_of("A"), 1.0),
            (adapters.parameters_of("B"), config.lr_ratio_B),
        ]
    return [
        {"params": [one for one in parameters if one not in still], "ratio": ratio}
        for parameters, ratio in groups
    ]


def _by_parameter(
    adapters: Adapters, factors: Mapping[str, float]
) -> dict[torch.Tensor, torch.Tensor]:
    """The factor of every element, for the parameters in which one is not 1. Sites that are fused
    share a parameter, so that Adam's own groups, which are of whole parameters, cannot have it."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    if all(factor == 1 for factor in factors.values()):
        return found
    for s in adapters.slices():
        if s.trained and (factor := factors[s.name.rpartition(".")[0]]) != 1:
            whole = found.setdefault(s.tensor, torch.ones_like(s.tensor, requires_grad=False))
            whole[s.index] = factor
    return found


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None  # a view of a buffer (adapters/gradients.py)
    return parameter.grad


class AdapterOptimizer:
    """The optimizer of one rank. `steps` counts applied steps, `scheduled` those of the learning
    rate (`Done`). `began`: of sites whose moments are younger than that, the step at which they
    began. Parameters of which no element has a factor above 0 are `still`: Adam does not know
    them."""

    def __init__(
        self,
        config: TrainerConfig,
        adapters: Adapters,
        total_steps: int,
        factors: Mapping[str, float] | None = None,
    ):
        """`total_steps`: of the whole run, for its learning rate. `factors`: of the learning rate,
        by site."""
        self.config, self.adapters, self.total_steps = config, adapters, total_steps
        self.frozen = {site for site, factor in (factors or {}).items() if factor == 0}
        self.factors = _by_parameter(adapters, factors or {})
        self.still = {one for one, factor in self.factors.items() if not factor.any()}
        for one in self.still:
            del self.factors[one]
        zeros = {one: factor == 0 for one, factor in self.factors.items()}
        self._zeros_of = {one: where for one, where in zeros.items() if where.any()}
        self.steps = self._shift = 0
        self.began: dict[str, int] = {}
        self.adam = torch.optim.AdamW(
            _groups(config, adapters, self.still),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        self.on_host = HostMoments(self.adam) if config.offloads_moments else None

    @property
    def scheduled(self) -> int:
        return self.steps + self._shift

    def step(self) -> StepResult:
        """As the run's settings and its learning rate have it: see `apply`."""
        lr = learning_rate(self.config, self.scheduled, self.total_steps)
        return self.apply(lr, self.config.clip_grad)

    def passed_over(self) -> StepResult:
        """There was no token in the loss: nothing is applied, and the learning rate goes on."""
        self._shift += 1
        return EMPTY

    def apply(self, lr: float, clip: float) -> StepResult:
        """Clips to a norm of `clip`, if it is not 0, and steps on gradients that are summed over
        ranks, unless their norm is NaN or infinite; the norm is the same on all ranks."""
        norm = self.norm()
        if not math.isfinite(norm):
            return StepResult(False, norm, lr)
        if clip and norm > clip:
            self.adapters.gradients.scale(clip / (norm + 1e-6))
        for group in self.adam.param_groups:
            group["lr"] = lr * group["ratio"]
        before = {parameter: parameter.detach().clone() for parameter in self.factors}
        streamed = 0.0
        if self.on_host is None:
            self.adam.step()
        else:
            streamed = self.on_host.step()
        with torch.no_grad():
            for parameter, factor in self.factors.items():
                parameter.copy_(before[parameter] + factor * (parameter - before[parameter]))
        self.adapters.gradients.check_copies()
        self.steps += 1
        return StepResult(True, norm, lr, streamed)

    @torch.no_grad()
    def norm(self) -> float:
        """The norm of the whole adapter's gradient, as `Gradients.norm`; what has the factor 0 is
        not trained, and its gradient becomes 0."""
        for parameter in self.still:
            _gradient_of(parameter).zero_()
        for parameter, where in self._zeros_of.items():
            _gradient_of(parameter).masked_fill_(where, 0)
        return self.adapters.gradients.norm()

    def state(self, key: str):
        """A function from a parameter to its Adam state `key` (exp_avg or exp_avg_sq): a tensor of
        the parameter's shape, zeros before the first step and of one that is not trained."""

        def of(parameter: torch.Tensor) -> torch.Tensor:
            state = self.adam.state.get(parameter, {})
            return state[key] if key in state else torch.zeros_like(parameter)

        return of

    @property
    def beginnings(self) -> dict[str, int]:
        """`began`, and now for a site that is not trained: once it is, Adam begins then."""
        return self.began | dict.fromkeys(self.frozen, self.steps)

    def restore(self, done: Done, began: Mapping[str, int] | None = None) -> set[torch.Tensor]:
        """Makes every state exist, at as many steps as were done since its site `began`, so that
        its tensors can be written. Returns the parameters for which Adam begins anew: those of
        sites that share one, of which it has one count of steps, and that began apart."""
        self.steps, self._shift = done.steps, done.scheduled - done.steps
        self.began = {site: at for site, at in (began or {}).items() if site not in self.frozen}
        trained: dict[torch.Tensor, set[str]] = {}
        for s in self.adapters.slices():
            site = s.name.rpartition(".")[0]
            if s.trained and site not in self.frozen:
                trained.setdefault(s.tensor, set()).add(site)
        firsts = {one: {self.began.get(s, 0) for s in sites} for one, sites in trained.items()}
        apart = set().union(*(trained[one] for one, first in firsts.items() if len(first) > 1))
        self.began |= dict.fromkeys(apart, self.steps)
        for parameter, sites in trained.items():
            self.adam.state[parameter] = {
                "step": torch.tensor(float(self.steps - self.began.get(min(sites), 0))),
                **{key: self._zeros(parameter) for key in MOMENTS},
            }
        return {parameter for parameter, sites in trained.items() if sites & apart}

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter) if self.on_host is None else host_zeros(parameter)
