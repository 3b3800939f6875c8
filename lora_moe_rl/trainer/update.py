"""One step's update: old and reference logprobs where they are needed, then the optimizer steps.

on-policy (one optimizer step a rollout)   the ratio is 1: old logprobs are the current ones,
                                           detached, and no extra forward is made
off-policy (epochs or mini_batches > 1)    one forward of all samples first
replay.mode=r2                             that forward also records the routes
algorithm.kl_coef > 0                      one forward with the adapters off
"""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.shards import Shard
from lora_moe_rl.algorithms import grpo, kl
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.trainer.batch import TrainBatch
from lora_moe_rl.trainer.engine import TrainingEngine, Work, check_coverage
from lora_moe_rl.trainer.logprobs import token_entropy
from lora_moe_rl.trainer.optimizer import StepResult
from lora_moe_rl.types import UpdateResult


def update(engine: TrainingEngine, batch: TrainBatch, table: RouteTable | None) -> UpdateResult:
    """Called on all ranks with the same arguments. `table` is the rollout's, for r3."""
    started = time.perf_counter()
    config = engine.config
    mode = config.replay.mode
    if mode == "r3":
        check_coverage(table, config.replay.missing)
    routes = table if mode == "r3" else None
    meter = _Meter(engine)
    with engine.watched_replay() as replay:
        groups = [
            engine.my_work(batch, np.flatnonzero(batch.mini_batch == m), routes, *_dp())
            for m in range(config.algorithm.mini_batches)
        ]
        _before_update(engine, [work for works in groups for work in works])
        results = [
            _optimizer_step(engine, works, meter)
            for _ in range(config.algorithm.epochs)
            for works in groups
        ]
        differing, replayed = replay.counts()
    meter.add("replay/differing", differing)
    meter.add("replay/replayed", replayed)
    metrics = _metrics(meter, results)
    metrics["replay/coverage"] = table.coverage if mode == "r3" else float(mode == "r2")
    return UpdateResult(
        version=engine.version,
        metrics=metrics,
        skipped=sum(not r.applied for r in results),
        nonfinite=sum(not np.isfinite(r.grad_norm) for r in results),
        seconds=time.perf_counter() - started,
    )


def gradients(
    engine: TrainingEngine, batch: TrainBatch, table: RouteTable
) -> tuple[float, float, list[Shard]]:
    """(loss, gradient norm, this rank's shards of the gradient) of one step on all samples, before
    clipping; the adapter stays as it is. The loss is that of `update`, its KL term included."""
    meter = _Meter(engine)
    with engine.watched_replay():
        works = engine.my_work(batch, range(len(batch.token_ids)), table, *_dp())
        _before_update(engine, works)
        _backward(engine, works, meter)
    sums = meter.reduce()
    shards = engine.adapters.export(of=lambda parameter: parameter.grad)
    loss = sums["policy_loss"] + engine.config.algorithm.kl_coef * sums["kl"]
    return loss / sums["tokens"], engine.adapters.gradients.norm(), shards


def _dp() -> tuple[int, int]:
    return ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()


def _before_update(engine: TrainingEngine, works: list[Work]) -> None:
    config = engine.config
    temperature = config.rollout.temperature
    if not config.algorithm.on_policy or config.replay.mode == "r2":
        engine.forward(works, "old", temperature, record=config.replay.mode == "r2")
    if config.algorithm.kl_coef:
        with engine.adapters.off():
            engine.forward(works, "ref", temperature)


def _optimizer_step(engine: TrainingEngine, works: list[Work], meter: _Meter) -> StepResult:
    _backward(engine, works, meter)
    if meter.tokens_everywhere() == 0:
        return StepResult(False, 0.0, 0.0)
    result = engine.optimizer.step()
    engine.version += result.applied
    return result


def _backward(engine: TrainingEngine, works: list[Work], meter: _Meter) -> None:
    """Gradients of the loss of `works`, summed over ranks."""
    config = engine.config
    device = engine.device.torch_device

    def loss(work: Work, logprobs: torch.Tensor, logits: torch.Tensor):
        data = work.data
        mask = torch.from_numpy(_loss_mask(work, config.replay.missing)).to(device)
        old = work.known.get("old")
        old = logprobs.detach() if old is None else old
        advantages = torch.from_numpy(data.advantages).to(device)
        total, sums = grpo.loss(
            logprobs, old, advantages, mask, work.known.get("ref"), config.algorithm
        )
        meter.add_sums(sums)
        meter.mismatch(work, old, token_entropy(logits.detach(), config.rollout.temperature,
                                                engine.spec.shape.vocab_size))  # fmt: skip
        return total, mask.sum().to(torch.int), {}

    engine.forward_backward(works, loss, config.rollout.temperature)


def _loss_mask(work: Work, missing: str) -> np.ndarray:
    """The loss mask, without tokens whose routes are missing when those are to be masked."""
    data, table = work.data, work.table
    if table is None or missing != "mask":
        return data.mask
    return data.mask & table.valid[np.maximum(data.rows, 0)].all(axis=1)


class _Meter:
    """Sums over tokens on this rank; `reduce` adds them up over all ranks."""

    def __init__(self, engine: TrainingEngine):
        self.engine = engine
        self.sums: dict[str, float] = defaultdict(float)
        self.max_diff = 0.0
        self.seen_tokens = 0.0
        # Under tensor parallelism every rank of a group computes the same logprobs.
        self.reports = engine.is_last_stage and ps.get_tensor_model_parallel_rank() == 0

    def add(self, name: str, value) -> None:
        self.sums[name] += float(value)

    def add_sums(self, sums: dict[str, torch.Tensor]) -> None:
        for name, value in sums.items():
            self.add(name, value)

    def mismatch(self, work: Work, trainer: torch.Tensor, entropy: torch.Tensor) -> None:
        """Rollout against trainer, over the response tokens of this micro-batch."""
        response = work.data.response
        stats = kl.mismatch(work.data.rollout_logprobs, trainer.cpu().numpy(), response)
        self.add("mismatch/kl", stats["kl"] * stats["tokens"])
        self.add("response_tokens", stats["tokens"])
        self.add("entropy", entropy.cpu().numpy()[response].sum())
        self.max_diff = max(self.max_diff, stats["max_abs_logprob_diff"])

    def tokens_everywhere(self) -> float:
        """Loss tokens since the last call, over all ranks."""
        here = self.sums["tokens"] - self.seen_tokens if self.reports else 0.0
        self.seen_tokens = self.sums["tokens"]
        return float(self._all_reduce([here], dist.ReduceOp.SUM)[0])

    def reduce(self) -> dict[str, float]:
        everyone = ("replay/differing", "replay/replayed")
        names = sorted(_SUMS)
        mine = [self.sums[n] if self.reports or n in everyone else 0.0 for n in names]
        total = self._all_reduce(mine, dist.ReduceOp.SUM)
        top = self._all_reduce([self.max_diff if self.reports else 0.0], dist.ReduceOp.MAX)
        return dict(zip(names, total.tolist(), strict=True)) | {"max_diff": float(top[0])}

    def _all_reduce(self, values: list[float], op) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.engine.device.torch_device)
        dist.all_reduce(tensor, op=op)
        return tensor.cpu()


_SUMS = {
    "policy_loss", "kl", "ratio", "clipped_low", "clipped_high", "tokens", "entropy",
    "response_tokens", "mismatch/kl", "replay/differing", "replay/replayed",
}  # fmt: skip


def _metrics(meter: _Meter, results: list[StepResult]) -> dict[str, float]:
    unknown = set(meter.sums) - _SUMS
    if unknown:
        raise ValueError(f"sums without a metric: {sorted(unknown)}")
    s = meter.reduce()
    tokens, responses = max(s["tokens"], 1.0), max(s["response_tokens"], 1.0)
    return {
        "loss/policy": s["policy_loss"] / tokens,
        "loss/kl": s["kl"] / tokens,
        "loss/ratio": s["ratio"] / tokens,
        "loss/clipped_low": s["clipped_low"] / tokens,
        "loss/clipped_high": s["clipped_high"] / tokens,
        "loss/tokens": s["tokens"],
        "policy/entropy": s["entropy"] / responses,
        "mismatch/kl": s["mismatch/kl"] / responses,
        "mismatch/max_abs_logprob_diff": s["max_diff"],
        "replay/disagreement": s["replay/differing"] / max(s["replay/replayed"], 1.0),
        "optim/grad_norm": float(np.mean([r.grad_norm for r in results])),
        "optim/lr": results[-1].lr,
    }
