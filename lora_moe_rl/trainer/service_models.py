"""The models of a training service on one rank: one is in the adapters, others wait on the host.

    select M     the one that is there goes to the host, M comes back: weights, moments, gradient
    forward      logprobs and a loss of given tokens; its gradient is added to what is there
    step         one step of Adam with settings of its own
    keep         a copy of a model's weights, to be served later

All ranks do the same in the same order. A model of a lower rank than its place has zeros in what is
left of A and B, which never have a gradient, and a scale of its own (`Switch.factor`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import unpack
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.router_replay.routes import Sent
from lora_moe_rl.trainer import service_losses
from lora_moe_rl.trainer.engine import TrainingEngine, Work
from lora_moe_rl.trainer.meter import Meter
from lora_moe_rl.trainer.update import replay_metrics
from lora_moe_rl.trainer.wide_head import WideHead

Moments = dict[str, torch.Tensor]


@dataclass
class Model:
    """`factor`: see `Switch`. `gradient`: of all forwards since the last step, summed over ranks;
    None without any. While it waits: `values` of the parameters in turn, and Adam's `moments` of
    each that has some, by its number; `steps` that Adam has made."""

    factor: float
    gradient: torch.Tensor | None = None
    values: list[torch.Tensor] | None = None
    moments: dict[int, Moments] = field(default_factory=dict)
    steps: int = 0


class Models:
    """`forget` is called whenever the adapters hold something else than before."""

    def __init__(self, engine: TrainingEngine, forget: Callable[[], None]):
        self.engine, self._forget = engine, forget
        self.of: dict[str, Model] = {}
        self.here: str | None = None  # the one that the adapters hold

    def create(self, name: str, seed: int, ranks: Mapping[str, int], factor: float) -> None:
        """A new model, of these ranks by site; it is the one that is there now."""
        self._leave()
        for layer in self.engine.adapters.layers:
            layer.begin(seed, ranks)  # pyright: ignore[reportAttributeAccessIssue] # no value head
        self._without_moments()
        self._arrive(name, Model(factor))

    def adopt(self, name: str, factor: float, optimizer: bool) -> None:
        """What was just read into the adapters, after `leave`, is this model."""
        if not optimizer:
            self._without_moments()
        self._arrive(name, Model(factor))

    def leave(self) -> None:
        """The adapters are free for what is to be read into them."""
        self._leave()

    def select(self, name: str) -> None:
        """Raises KeyError for a model that is not known."""
        model = self.of[name]
        if self.here == name:
            return
        self._leave()
        assert model.values is not None
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), model.values, strict=True):
                parameter.copy_(value)
        self._without_moments()
        state = self.engine.optimizer.adam.state
        for number, moments in model.moments.items():
            parameter = self._parameters()[number]
            state[parameter] = {
                key: value if key == "step" else value.to(parameter.device)
                for key, value in moments.items()
            }
        self.engine.optimizer.steps = model.steps
        model.values, model.moments = None, {}
        self._arrive(name, model)

    def keep(self, name: str, copy: str) -> None:
        """A copy of a model's weights waits under the name `copy`: it is there to be served."""
        self.select(name)
        self.of[copy] = Model(self.of[name].factor, values=self._values())

    def forget_gradient(self, name: str) -> None:
        self.of[name].gradient = None

    def forget(self, name: str) -> None:
        """Nobody asks for it any more."""
        self.of.pop(name, None)
        if self.here == name:
            self.here = None

    def forward(
        self,
        name: str,
        loss: str,
        settings: service_losses.Settings,
        backward: bool,
        batch: TrainBatch,
        parts: Sequence[Sent],
    ) -> tuple[dict[int, np.ndarray], dict[str, float]]:
        """(Logprobs of the targets of this rank's samples, float32 [R] or [R, K], from the ranks
        that have them; metrics, the same on all). `parts`: the samples' routes in turn."""
        self.select(name)
        engine, model = self.engine, self.of[name]
        meter = Meter(engine.device, engine.is_last_stage, engine.algorithm)
        routes = engine.routes(batch, parts)
        head, total = (
            engine.head(1.0),
            functools.partial(_total, meter, *service_losses.find(loss, settings)),
        )
        if batch.wide:
            head = WideHead(1.0, engine.spec.shape.vocab_size)
            total = functools.partial(_wide_total, meter)
        with engine.watched_replay(batch, routes):
            dp = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
            works = engine.my_work(batch, np.arange(len(batch)), routes, *dp)
            if backward:
                engine.forward_backward(works, total, head, divisor=1.0)
                self._add(model)
            else:
                engine.evaluate(works, total, head)
        metrics = _metrics(meter, works) | replay_metrics(engine, batch, routes, meter)
        logprobs: dict[int, np.ndarray] = {}
        if meter.reports:
            for work in works:
                logprobs |= unpack(work.data, work.known["score"].cpu().numpy())
        return logprobs, metrics

    def step(
        self,
        name: str,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        clip: float,
    ) -> dict[str, float]:
        """Makes an optimizer step on the gradient that is there, which is gone then. Raises
        ServiceError without one, and for one that is not finite: the model is as it was."""
        self.select(name)
        model, optimizer = self.of[name], self.engine.optimizer
        gradient, model.gradient = model.gradient, None
        if gradient is None:
            raise ServiceError(
                "this model has no gradient: call forward_backward before each optim_step"
            )
        self.engine.adapters.gradients.whole.copy_(gradient)
        for group in optimizer.adam.param_groups:
            group.update(betas=betas, eps=eps, weight_decay=decay)
        result = optimizer.apply(lr, clip)
        if not result.applied:
            raise ServiceError(
                f"the gradient's norm is {result.grad_norm}: the step was not made, and its "
                "gradient is dropped"
            )
        self._forget()
        return {"grad_norm": result.grad_norm, "lr": result.lr}

    def _add(self, model: Model) -> None:
        """What the backward has left, summed over ranks, to what is there."""
        found = self.engine.adapters.gradients.whole
        if model.gradient is None:
            model.gradient = found.clone()
        else:
            model.gradient += found

    def _leave(self) -> None:
        """What is there goes to the host."""
        name, self.here = self.here, None
        if name is None:
            return
        model, optimizer = self.of[name], self.engine.optimizer
        model.values, model.steps = self._values(), optimizer.steps
        for number, parameter in enumerate(self._parameters()):
            if state := optimizer.adam.state.get(parameter):
                model.moments[number] = {key: _on_host(value) for key, value in state.items()}
        if model.gradient is not None:
            model.gradient = _on_host(model.gradient)

    def _arrive(self, name: str, model: Model) -> None:
        if model.gradient is not None:
            model.gradient = model.gradient.to(self.engine.adapters.gradients.whole.device)
        self.engine.adapters.switch.factor = model.factor
        self.of[name], self.here = model, name
        self._forget()

    def _without_moments(self) -> None:
        """Adam begins anew."""
        optimizer = self.engine.optimizer
        optimizer.adam.state.clear()
        optimizer.steps, optimizer.began = 0, {}

    def _values(self) -> list[torch.Tensor]:
        return [_on_host(parameter) for parameter in self._parameters()]

    def _parameters(self) -> list[torch.nn.Parameter]:
        return self.engine.adapters.parameters()


def _total(
    meter: Meter,
    loss: service_losses.ServiceLoss,
    settings: service_losses.Settings,
    work: Work,
    logprobs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """The summed loss of a micro-batch; its logprobs become `known["score"]`."""
    data, device = work.data, logprobs.device
    streams = data.rollout_logprobs, data.advantages
    before, coefficient = (on_device(torch.from_numpy(one), device) for one in streams)
    mask = on_device(torch.from_numpy(data.response), device)
    marked = ()
    if loss.marks:
        marked = (on_device(torch.from_numpy(one), device) for one in (data.marks, data.places))
    tokens = service_losses.Tokens(logprobs, before, coefficient, *marked)
    total = loss.values(tokens, settings).where(mask, 0).sum()
    work.known["score"] = logprobs.detach()
    meter.add("loss", total.detach())
    if loss.compares:
        work.known["apart"] = before - logprobs.detach()
    return total, mask.sum().to(torch.int), {}


def _wide_total(
    meter: Meter, work: Work, weighted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """So too of several targets at a place, by cross-entropy: the head has weighted them."""
    mask = on_device(torch.from_numpy(work.data.response), weighted.device)
    total = -weighted.where(mask, 0).sum()
    meter.add("loss", total.detach())
    return total, mask.sum().to(torch.int), {}


def _metrics(meter: Meter, works: Sequence[Work]) -> dict[str, float]:
    """`loss`; of tokens that came with the logprob of their sampling, how far it is from what is
    found now: `kl`, the mean of log(then / now), and `apart`, the largest difference."""
    furthest = 0.0
    for work in works if meter.reports else ():
        apart = work.known.get("apart")
        if apart is not None:
            told = apart.cpu().numpy()[work.data.response & (work.data.rollout_logprobs != 0)]
            meter.add("kl", told.sum())
            meter.add("told", len(told))
            furthest = max(furthest, float(np.abs(told).max(initial=0)))
    loss, kl, told = meter.summed(["loss", "kl", "told"])
    if not told:
        return {"loss": loss}
    (furthest,) = meter.all_reduce([furthest], dist.ReduceOp.MAX)
    return {"loss": loss, "kl": kl / told, "apart": furthest}


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
