"""A trainer's update on the device that computes nothing, in a process of its own.

    python -m noop_cuda.step waits MODEL_DIR '{"recompute": "full"}'
    python -m noop_cuda.step memory NAME LAYERS RECOMPUTE

The last line is what was found, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import noop_cuda


def waits(model: str, trainer: str) -> dict:
    """Where the host waited for the device between the micro-batches of an update, as torch tells
    it: of this repository's code, and of others'."""
    from device_waits import on_cuda, watch

    from lora_moe_rl.config import RunConfig
    from lora_moe_rl.trainer.worker import TrainerWorker
    from lora_moe_rl.verify.inputs import random_adapter, random_batch
    from lora_moe_rl.verify.ranks import free_address, spec_of

    settings = {"device": "cuda", "micro_batch_tokens": 60, **json.loads(trainer)}
    config = RunConfig(model=model, trainer=settings, replay={"audit": 0})
    folder = Path(model)
    spec = spec_of(folder, config)
    worker = TrainerWorker(config, spec, folder, 0)
    worker.start(free_address(), 1)
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    worker.update(batch, table)  # compiles kernels
    places = watch(worker.engine, on_cuda)
    worker.update(batch, table)
    return {
        "ours": places.ours(), "others": places.others(), "micro_batches": worker.engine.trained[0]
    }  # fmt: skip


def memory(name: str, layers: str, recompute: str) -> dict:
    """Bytes of torch's allocator around an update of some layers at full width: held before and
    after it, and the most within it; and what the planner says of both."""
    import torch

    from lora_moe_rl.bench.gpu.stages import slices
    from lora_moe_rl.verify.inputs import random_batch

    config = slices.hf_config(name, int(layers), "cuda")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        one = slices.Slice(Path(folder), config, recompute, "cuda")
        worker, _ = one._start()
        lengths = (one.tokens, one.tokens + 1)
        batch, table = random_batch(one.spec, samples=one.sequences, lengths=lengths)
        worker.update(batch, table)  # makes the optimizer's moments
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        worker.update(batch, table)
        plan = one.planned()
    return {
        "before": before,
        "after": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "planned": {"held": {part: plan.memory[part] for part in HELD}, "peak": plan.tensors},
        "held": {part: worker.memory()[part] for part in HELD},
    }


HELD = ("base", "adapter", "gradients", "optimizer")

if __name__ == "__main__":
    noop_cuda.prepare()
    from lora_moe_rl.config import TrainerConfig
    from lora_moe_rl.trainer.device import Device

    Device.choose(TrainerConfig(device="cuda")).prepare(1)
    noop_cuda.without_numbers()
    what, *arguments = sys.argv[1:]
    print(json.dumps({"waits": waits, "memory": memory}[what](*arguments)), flush=True)
