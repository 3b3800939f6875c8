"""Some layers of a published model at full width, with random weights: memory beside the plan's,
and where the time of an update goes.

Each slice has a process of its own, so that one that does not fit takes nothing with it. It puts
each figure as soon as it is found, and has its share of the time that the stage has left.
"""

from __future__ import annotations

import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.bench.gpu.parts import Parts, left_s
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.planner import facts
from lora_moe_rl.planner.compute import Flops, flops
from lora_moe_rl.planner.trainer import RankClass, TrainerMemory
from lora_moe_rl.run.performance import peak_of
from lora_moe_rl.verify.processes import apart, quickest

RANK, ALPHA = 16, 32
SEQUENCES, TOKENS = {"cuda": 16, "cpu": 4}, {"cuda": 1025, "cpu": 33}
CPU_LAYERS = 3
ROUNDS = 3  # of which the first compiles kernels
LEFT_FREE = 2 * 2**30  # beside the plan: workspaces of kernels, and what fragments
LONGEST = 20  # kernels of an update that are listed
# What a CPU can take of a config.
NARROW = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "num_experts": 16,
    "n_routed_experts": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def run(parts: Parts, device: str, *wanted: str) -> None:
    """`wanted`: MODEL:LAYERS:RECOMPUTE, with a name of planner/models."""
    for done, one in enumerate(wanted):
        job = (measure, str(parts.path), one, device)
        limits = {"timeout_s": left_s() / (len(wanted) - done), "start": quickest()}
        parts.part(one, lambda job=job, limits=limits: apart("slice", *job, **limits))


def hf_config(name: str, layers: int, device: str) -> dict[str, Any]:
    """The published config with fewer layers, at most one of them dense; narrow on a CPU."""
    config = facts.config_of(name) | {"num_hidden_layers": layers}
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = min(1, layers - 1)
    narrow = {key: value for key, value in NARROW.items() if key in config}
    return config | (narrow if device == "cpu" else {})


def measure(file: str, label: str, device: str) -> dict[str, Any]:
    """A process's job: puts the parts `label` and `label: longest` into a file, and returns the
    first of them."""
    parts = Parts(Path(file))
    name, layers, recompute = label.split(":")
    asked = min(int(layers), CPU_LAYERS) if device == "cpu" else int(layers)
    with tempfile.TemporaryDirectory() as folder:
        one = fitting(Path(folder), name, asked, recompute, device)
        found: dict[str, Any] = {"layers_asked": asked}
        for more in one.figures():
            found |= more
            parts.put(label, found)
        parts.part(f"{label}: longest", one.longest)
    return found


def fitting(folder: Path, name: str, asked: int, recompute: str, device: str) -> Slice:
    """The slice with as many of the layers as the device has room for by the plan. Raises
    BenchmarkError when that is none."""
    room = free_bytes(device) - LEFT_FREE
    needed = 0
    for fewer in range(asked, 0, -1):
        config = hf_config(name, fewer, device)
        (folder / "config.json").write_text(json.dumps(config))
        one = Slice(folder, config, recompute, device)
        needed = one.planned().total
        if needed <= room:
            return one
    raise BenchmarkError(
        f"one layer of {name} needs {needed / 2**30:.1f} GiB by the plan, and {room / 2**30:.1f} "
        f"GiB are free beside {LEFT_FREE / 2**30:g}"
    )


def free_bytes(device: str) -> float:
    """The free bytes of the GPU's memory. A CPU has no part in it: what is measured there is
    small."""
    import torch

    return torch.cuda.mem_get_info()[0] if device == "cuda" else math.inf


class Slice:
    """One slice in this process."""

    def __init__(self, folder: Path, config: dict[str, Any], recompute: str, device: str):
        self.cuda = device == "cuda"
        self.sequences, self.tokens = SEQUENCES[device], TOKENS[device]
        self.folder, self.recompute = folder, recompute
        micro_batch = (self.tokens - 1) * self.sequences // 2
        self.config = RunConfig.model_validate(
            {
                "model": {"path": str(folder), "max_length": self.tokens},
                "adapter": {"rank": RANK, "alpha": ALPHA},
                "trainer": {
                    "device": device, "recompute": recompute, "micro_batch_tokens": micro_batch
                },
                "replay": {"audit": 0},
            }
        )  # fmt: skip
        shape = ModelShape.from_hf_config(config)
        self.spec = AdapterSpec.build(shape, self.config.adapter, servable=False)
        self.facts = facts.find(str(folder))

    def figures(self) -> Iterator[dict[str, Any]]:
        """Each as soon as it is found."""
        yield {"layers": self.spec.shape.num_layers, "recompute": self.recompute}
        worker, build_s = self._start()
        from lora_moe_rl.verify.inputs import random_batch

        lengths = (self.tokens, self.tokens + 1)
        batch, table = random_batch(self.spec, samples=self.sequences, lengths=lengths)
        sequences = [ids.tolist() for ids in batch.token_ids]
        tokens = sum(len(ids) - 1 for ids in batch.token_ids)
        yield {"build_s": build_s, "tokens": tokens}
        self._forget_peak()
        self.update = lambda: worker.update(batch, table)
        seconds = {"update": self._seconds(self.update)}
        yield {
            "tokens_per_s": tokens / seconds["update"],
            "memory": self._memory(worker.memory(), self._peak()),
        }
        work = flops(self.facts, self.spec, self.tokens - 1, self.recompute)
        yield self._speeds(work, tokens, seconds)
        for name, adapted in (("forward", True), ("forward_base", False)):
            seconds[name] = self._seconds(lambda on=adapted: worker.score(sequences, table, on))
            yield self._speeds(work, tokens, seconds)

    def longest(self) -> list[tuple[str, float, int]]:
        """The longest kernels of an update; after `figures`."""
        return longest(self.update, self.cuda)

    def _start(self):
        """The rank, and the seconds that it took."""
        from lora_moe_rl.trainer.device import Device

        threads = len(os.sched_getaffinity(0))
        Device.choose(self.config.trainer).prepare(threads)  # before Megatron is imported
        from lora_moe_rl.bench.gpu import random_base

        started = time.perf_counter()
        worker = random_base.start(self.config, self.spec, self.folder, threads)
        return worker, time.perf_counter() - started

    def _seconds(self, call: Callable[[], object]) -> float:
        """The least of the rounds after the first."""
        import torch

        taken = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            call()
            if self.cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return min(taken[1:])

    def _speeds(self, work: Flops, tokens: int, seconds: dict[str, float]) -> dict[str, Any]:
        """`mfu`: shares of the GPU's dense bfloat16 peak; None for one that the planner does not
        know."""
        import torch

        found = tflop_s(work, tokens, seconds)
        peak = peak_of(torch.cuda.get_device_name()) if self.cuda else None
        mfu = None if peak is None else {name: 1e12 * one / peak for name, one in found.items()}
        return {"seconds": dict(seconds), "tflop_s": found, "mfu": mfu}

    def _memory(self, held: dict[str, int], peak: dict[str, int]) -> dict[str, Any]:
        """Bytes: by the plan, held of it, and at the most. `held_of_plan` and `peak_of_plan`: the
        shares of what was planned."""
        planned = self.planned()
        shares = {name: held[name] / planned.memory[name] for name in held}
        found = {"plan": planned.memory, "held": held, "held_of_plan": shares} | peak
        if peak:
            found["peak_of_plan"] = peak["peak_allocated"] / planned.tensors
        return found

    def planned(self) -> RankClass:
        weights = "bf16" if self.cuda else "float32"
        (rank,) = TrainerMemory(self.facts, self.spec, weights).classes(self.config)
        return rank

    def _forget_peak(self) -> None:
        import torch

        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> dict[str, int]:
        import torch

        if not self.cuda:
            return {}
        return {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }


def tflop_s(work: Flops, tokens: int, seconds: dict[str, float]) -> dict[str, float]:
    """TFLOP/s by the planner's count. The update is a forward and a backward: nothing is asked for
    before it."""
    operations = {
        "update": work.train,
        "forward": work.forward,
        "forward_base": 2 * work.active + work.attention,
    }
    return {name: operations[name] * tokens / taken / 1e12 for name, taken in seconds.items()}


def longest(call: Callable[[], object], cuda: bool) -> list[tuple[str, float, int]]:
    """(Name, milliseconds, calls) of the kernels that take longest, on a CPU of its operators."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities) as profiled:
        call()
        if cuda:
            torch.cuda.synchronize()
    taken = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = sorted(profiled.key_averages(), key=lambda row: -getattr(row, taken))
    return [(row.key[:90], getattr(row, taken) / 1e3, row.count) for row in rows[:LONGEST]]
