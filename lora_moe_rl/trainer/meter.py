"""Sums over tokens on each rank, and the metrics of a step that they become."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.spec import ModelShape
from lora_moe_rl.algorithms.base import Algorithm
from lora_moe_rl.algorithms.parts import kl
from lora_moe_rl.data.packing import MicroBatch
from lora_moe_rl.router_replay.replay import Replay
from lora_moe_rl.telemetry import names
from lora_moe_rl.trainer.device import Device
from lora_moe_rl.trainer.optimizer import StepResult, norm_and_rate

WITH, WITHOUT = "mismatch", "mismatch/without_replay"
_MISMATCH_MEANS = tuple(name for name in kl.MISMATCH if not name.startswith("max"))
# Of the sampled token where rollout and trainer are furthest apart: by how much, the number of its
# sample in the step, its index among the sample's tokens, and both logprobs.
WORST = (
    "max_abs_logprob_diff",
    *(f"worst_{name}" for name in ("sample", "token", "rollout_logprob", "trainer_logprob")),
)
NO_TOKEN = (0.0, -1.0, -1.0, 0.0, 0.0)
_ALWAYS = ("tokens", "entropy", "masked", "rejected")


class Meter:
    """`reports`: whether this rank's sums count. Under tensor and context parallelism every rank of
    a group has the same logprobs, and only the last stage has any. `declared`: the metrics of the
    algorithm, and how each is put together. `lag`: how many steps a token may be old; a step is
    `versions_per_step` versions, and `version` the one before the update. `epochs`: how often each
    token of the step is told of."""

    def __init__(
        self,
        device: Device,
        is_last_stage: bool,
        algorithm: Algorithm,
        lag: int = 0,
        version: int = 0,
        versions_per_step: int = 1,
        epochs: int = 1,
    ):
        self.device, self.algorithm, self.declared = device, algorithm, algorithm.metrics
        self.version, self.versions_per_step, self.epochs = version, versions_per_step, epochs
        self.ages = range(lag + 1) if lag else range(0)
        # Whether an engine has sampled the tokens, which can be compared with it then.
        self.sampled = algorithm.learns_from == "rollouts"
        self.of_step: dict[str, float] = {}  # what the algorithm says of the step as a whole
        self.sums: dict[str, float] = defaultdict(float)
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._later: list[Callable[[], None]] = []
        self.extremes: dict[str, float] = {}  # of the metrics that are a max or a min
        # By prefix, of the token that was furthest apart: see WORST.
        self.worst = {WITH: NO_TOKEN, WITHOUT: NO_TOKEN}
        self.reports = is_last_stage and (
            ps.get_tensor_model_parallel_rank() == ps.get_context_parallel_rank() == 0
        )

    def add(self, name: str, value) -> None:
        """A number, or a tensor of one, which is read when a figure is asked for."""
        if isinstance(value, torch.Tensor):
            self._tensors.append((name, value.detach()))
        else:
            self.sums[name] += float(value)

    def later(self, read: Callable[[], None]) -> None:
        """Calls `read`, which adds something, when a figure is asked for. To read a device waits
        for it: not while it is being given a step's work."""
        self._later.append(read)

    def settle(self) -> None:
        """Reads all that was left for later."""
        reads, self._later = self._later, []
        for read in reads:
            read()
        added, self._tensors = self._tensors, []
        if added:
            values = torch.stack([value.to(torch.float64) for _, value in added]).tolist()
            for (name, _), value in zip(added, values, strict=True):
                self.sums[name] += value

    def add_metrics(self, metrics: Mapping[str, torch.Tensor], stands: torch.Tensor) -> None:
        """Adds metrics of the tokens of one micro-batch; all [T]. stands: int, how many times each
        token is in the loss. Raises ValueError for other metrics than those declared: a rank
        without them would wait for ever for the others."""
        if set(metrics) != set(self.declared):
            raise ValueError(
                f"the loss returned the metrics {sorted(metrics)}; its algorithm declares "
                f"{sorted(self.declared)}"
            )
        mask = stands > 0
        for name, value in metrics.items():
            how = self.declared[name]
            if how in ("max", "min"):
                self.later(functools.partial(self._extreme, name, value.detach(), mask))
            else:
                self.add(f"loss/{name}", (value.where(mask, 0) * stands).sum(dtype=torch.float64))

    def _extreme(self, name: str, value: torch.Tensor, mask: torch.Tensor) -> None:
        pick = max if self.declared[name] == "max" else min
        known = [self.extremes[name]] if name in self.extremes else []
        if here := known + value[mask].tolist():
            self.extremes[name] = pick(here)

    def mismatch(self, prefix: str, data: MicroBatch, trainer: torch.Tensor) -> None:
        """Rollout against trainer, over the sampled tokens of this micro-batch; if there may be
        older ones, the KL also of each age apart. Nothing when no engine sampled them.

        A token is as old as the oldest one of its sequence, whose routes it follows on: where
        another version goes on (schedule.continued=join), the engine's routes of the prefix were
        others."""
        if self.sampled:
            self.later(functools.partial(self._mismatch, prefix, data, trainer.detach()))

    def _mismatch(self, prefix: str, data: MicroBatch, trainer: torch.Tensor) -> None:
        ours, theirs = trainer.cpu().numpy(), data.rollout_logprobs
        ages = self._ages(data)
        if prefix == WITH:
            self.add(names.MISMATCH_JUDGED, (data.sampled & (ages == 0)).sum())
        for age in self.ages if prefix == WITH else ():
            found = kl.mismatch(theirs, ours, data.sampled & (ages == age))
            self.add(f"{names.kl_of_age(age)}/sum", found["kl"] * found["tokens"])
            self.add(f"{names.kl_of_age(age)}/tokens", found["tokens"])
        stats = kl.mismatch(theirs, ours, data.sampled)
        for name in _MISMATCH_MEANS:
            self.add(f"{prefix}/{name}", stats[name] * stats["tokens"])
        self.add(f"{prefix}/tokens", stats["tokens"])
        of_samples = kl.mismatch_of_samples(theirs, ours, data.sampled, data.places)
        for name in kl.OF_SAMPLES:
            self.add(f"{prefix}/{name}", of_samples[name] * of_samples["samples"])
        self.add(f"{prefix}/samples", of_samples["samples"])
        found = kl.worst(theirs, ours, data.sampled)
        if found is not None and found[1] > self.worst[prefix][0]:
            t, diff = found
            sample, token = float(data.sample_of[t]), data.positions[t] + 1.0  # predicted at t
            self.worst[prefix] = (diff, sample, token, float(theirs[t]), float(ours[t]))

    def _ages(self, data: MicroBatch) -> np.ndarray:
        """int [T], in steps: of each sequence's oldest sampled token."""
        ages = -((data.versions - self.version) // self.versions_per_step)
        lengths = np.diff(data.cu_seqlens)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        oldest = np.zeros(len(lengths), ages.dtype)
        np.maximum.at(oldest, sequence[data.sampled], ages[data.sampled])
        return oldest[sequence]

    def loss(self, divisor: float) -> float:
        """The summed loss so far / `divisor`."""
        return self._reduce(["loss"])["loss"] / divisor

    def metrics(self, results: list[StepResult], compared: bool) -> dict[str, float]:
        """`compared`: whether there was a forward without replay."""
        prefixes = (WITH, WITHOUT) if compared else (WITH,) if self.sampled else ()
        sums = [f"loss/{n}" for n, how in self.declared.items() if how in ("token_mean", "sum")]
        apart = (*_MISMATCH_MEANS, "tokens", *kl.OF_SAMPLES, "samples")
        sums += [f"{p}/{name}" for p in prefixes for name in apart]
        s = self._reduce([*_ALWAYS, names.MISMATCH_JUDGED, *sums])
        tokens = max(s["tokens"], 1.0)
        responses = max(s[f"{WITH}/tokens"], 1.0) if self.sampled else tokens
        metrics = {
            f"loss/{name}": s[f"loss/{name}"] / (tokens if how == "token_mean" else 1.0)
            for name, how in self.declared.items()
            if how in ("token_mean", "sum")
        }
        metrics |= self._extremes()
        norm, rate = norm_and_rate(results)
        metrics |= self.algorithm.summary(metrics) | {
            "loss/tokens": s["tokens"] / self.epochs,
            "loss/rejected_tokens": s["rejected"],
            "policy/entropy": s["entropy"] / responses,
            "optim/grad_norm": norm,
            "optim/lr": rate,
            **self.of_step,
        }
        if any(streamed := [r.streamed for r in results]):
            metrics["optim/streamed_seconds"] = sum(streamed)
        if self.sampled:
            metrics["replay/masked_tokens"] = s["masked"]
            metrics[names.MISMATCH_JUDGED] = s[names.MISMATCH_JUDGED] / responses
        for prefix in prefixes:
            count = max(s[f"{prefix}/tokens"], 1.0)
            metrics |= {
                f"{prefix}/{name}": s[f"{prefix}/{name}"] / count for name in _MISMATCH_MEANS
            }
            samples = max(s[f"{prefix}/samples"], 1.0)
            metrics |= {f"{prefix}/{n}": s[f"{prefix}/{n}"] / samples for n in kl.OF_SAMPLES}
            worst = self._worst_anywhere(prefix)
            metrics |= {f"{prefix}/{n}": v for n, v in zip(WORST, worst, strict=True)}
        return metrics | self._by_age()

    def _by_age(self) -> dict[str, float]:
        """The KL of the tokens of each age; NaN where there are none."""
        of_age = [names.kl_of_age(age) for age in self.ages]
        if not of_age:
            return {}
        sums = self._reduce([f"{name}/{what}" for name in of_age for what in ("sum", "tokens")])
        return {
            name: sums[f"{name}/sum"] / sums[f"{name}/tokens"]
            if sums[f"{name}/tokens"]
            else math.nan
            for name in of_age
        }

    def _worst_anywhere(self, prefix: str) -> list[float]:
        """WORST over all ranks."""
        self.settle()
        mine = self.worst[prefix] if self.reports else NO_TOKEN
        every = torch.zeros(dist.get_world_size(), len(WORST), dtype=torch.float64)
        every[dist.get_rank()] = torch.tensor(mine, dtype=torch.float64)
        gathered = self.all_reduce(every.ravel().tolist())
        rows = [gathered[i : i + len(WORST)] for i in range(0, len(gathered), len(WORST))]
        return max(rows, key=lambda row: row[0])

    def _extremes(self) -> dict[str, float]:
        """The largest and smallest over all ranks; NaN when no rank has any."""
        self.settle()
        found = {}
        for how, op, none in (
            ("max", dist.ReduceOp.MAX, -math.inf),
            ("min", dist.ReduceOp.MIN, math.inf),
        ):
            names = [name for name, declared in self.declared.items() if declared == how]
            here = [self.extremes.get(n, none) if self.reports else none for n in names]
            if names:
                top = self.all_reduce(here, op)
                found |= {
                    f"loss/{name}": math.nan if value == none else value
                    for name, value in zip(names, top, strict=True)
                }
        return found

    def summed(self, names: Sequence[str]) -> list[float]:
        """What was added under each name, over all ranks."""
        return list(self._reduce(list(names)).values())

    def _reduce(self, names: list[str]) -> dict[str, float]:
        """Sums over all ranks."""
        self.settle()
        total = self.all_reduce([self.sums[n] if self.reports else 0.0 for n in names])
        return dict(zip(names, total, strict=True))

    def disagreement(self, replay: Replay, moe_layers: tuple[int, ...]) -> dict[str, float]:
        """Share of replayed routes that the trainer would have chosen differently: of each layer,
        and of all."""
        counts = replay.counts()
        mine = np.array([counts.get(layer, (0, 0)) for layer in moe_layers], dtype=np.float64)
        total = np.array(self.all_reduce(mine.ravel().tolist())).reshape(-1, 2)
        shares = total[:, 0] / np.maximum(total[:, 1], 1)
        by_layer = {
            f"replay/disagreement/layer_{layer:02d}": float(share)
            for layer, share in zip(moe_layers, shares, strict=True)
        }
        every = total.sum(axis=0)
        return {"replay/disagreement": float(every[0] / max(every[1], 1))} | by_layer

    def expert_loads(self, replay: Replay, shape: ModelShape) -> np.ndarray | None:
        """int64 `[MoE layers, experts]`: how often each expert was chosen in the update's forwards.
        None of a dense model. Every token is on one rank of each layer: under tensor parallelism
        routers see slices of the sequence."""
        if not shape.moe_layers:
            return None
        here, size = replay.loads(), (len(shape.moe_layers), shape.num_experts)
        found = torch.zeros(size, dtype=torch.float64)
        rows = [row for row, layer in enumerate(shape.moe_layers) if layer in here]
        if rows:
            found[rows] = torch.stack([here[shape.moe_layers[row]] for row in rows]).cpu().double()
        total = self.all_reduce(found.ravel().tolist())
        return np.array(total).astype(np.int64).reshape(found.shape)

    def all_reduce(self, values: list[float], op=dist.ReduceOp.SUM) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device.torch_device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()
