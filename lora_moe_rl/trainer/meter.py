"""Sums over tokens on each rank, and the metrics of a step that they become."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lora_moe_rl.algorithms import kl
from lora_moe_rl.data.batch import MicroBatch
from lora_moe_rl.router_replay.replay import Replay
from lora_moe_rl.trainer.device import Device
from lora_moe_rl.trainer.optimizer import StepResult

WITH, WITHOUT = "mismatch", "mismatch/without_replay"
_MEANS = tuple(name for name in kl.MISMATCH if not name.startswith("max"))
_SUMS = sorted(
    {"policy_loss", "kl", "ratio", "clipped_low", "clipped_high", "tokens", "entropy", "masked"}
    | {f"{prefix}/{name}" for prefix in (WITH, WITHOUT) for name in (*_MEANS, "tokens")}
)


class Meter:
    """`reports`: whether this rank's sums count. Under tensor parallelism every rank of a group
    computes the same logprobs, and only the last stage has any."""

    def __init__(self, device: Device, is_last_stage: bool):
        self.device = device
        self.sums: dict[str, float] = defaultdict(float)
        self.max_diff = {WITH: 0.0, WITHOUT: 0.0}
        self.seen_tokens = 0.0
        self.reports = is_last_stage and ps.get_tensor_model_parallel_rank() == 0

    def add(self, name: str, value) -> None:
        self.sums[name] += float(value)

    def add_sums(self, sums: dict[str, torch.Tensor]) -> None:
        for name, value in sums.items():
            self.add(name, value)

    def mismatch(self, prefix: str, data: MicroBatch, trainer: torch.Tensor) -> None:
        """Rollout against trainer, over the response tokens of this micro-batch."""
        stats = kl.mismatch(data.rollout_logprobs, trainer.cpu().numpy(), data.response)
        for name in _MEANS:
            self.add(f"{prefix}/{name}", stats[name] * stats["tokens"])
        self.add(f"{prefix}/tokens", stats["tokens"])
        self.max_diff[prefix] = max(self.max_diff[prefix], stats["max_abs_logprob_diff"])

    def tokens_everywhere(self) -> float:
        """Loss tokens since the last call, over all ranks."""
        here = self.sums["tokens"] - self.seen_tokens if self.reports else 0.0
        self.seen_tokens = self.sums["tokens"]
        return float(self.all_reduce([here])[0])

    def reduce(self) -> dict[str, float]:
        """The sums over all ranks. Raises ValueError for one that has no place in a metric."""
        if unknown := set(self.sums) - set(_SUMS):
            raise ValueError(f"sums without a metric: {sorted(unknown)}")
        total = self.all_reduce([self.sums[n] if self.reports else 0.0 for n in _SUMS])
        return dict(zip(_SUMS, total, strict=True))

    def metrics(self, results: list[StepResult], compared: bool) -> dict[str, float]:
        """`compared`: whether there was a forward without replay."""
        s = self.reduce()
        tokens, responses = max(s["tokens"], 1.0), max(s[f"{WITH}/tokens"], 1.0)
        metrics = {
            "loss/policy": s["policy_loss"] / tokens,
            "loss/kl": s["kl"] / tokens,
            "loss/ratio": s["ratio"] / tokens,
            "loss/clipped_low": s["clipped_low"] / tokens,
            "loss/clipped_high": s["clipped_high"] / tokens,
            "loss/tokens": s["tokens"],
            "policy/entropy": s["entropy"] / responses,
            "replay/masked_tokens": s["masked"],
            "optim/grad_norm": float(np.mean([r.grad_norm for r in results])),
            "optim/lr": results[-1].lr,
        }
        prefixes = (WITH, WITHOUT) if compared else (WITH,)
        here = [self.max_diff[p] if self.reports else 0.0 for p in prefixes]
        top = self.all_reduce(here, dist.ReduceOp.MAX)
        for prefix, largest in zip(prefixes, top, strict=True):
            count = max(s[f"{prefix}/tokens"], 1.0)
            metrics |= {f"{prefix}/{name}": s[f"{prefix}/{name}"] / count for name in _MEANS}
            metrics[f"{prefix}/max_abs_logprob_diff"] = largest
        return metrics

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

    def all_reduce(self, values: list[float], op=dist.ReduceOp.SUM) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device.torch_device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()
