"""One process of `bench dequant`: `make FOLDER SIZES`, or `int4|float32 FOLDER TOKENS`.

`int4` leaves its logprobs and gradients in the folder, `float32` compares its own with them.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.bench.process import status_bytes
from lora_moe_rl.config import RunConfig

LENGTHS = (96, 129)  # of a sample, in tokens
ROUNDS = 3


def make(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """The same random weights twice: quantised, and as the numbers that they stand for."""
    from lora_moe_rl.bench.model import deepseek_v3, save_random
    from lora_moe_rl.export.merged import dequantise
    from lora_moe_rl.tiny.quantise import quantise
    from lora_moe_rl.tiny.shapes import EXTRA_CONFIG

    save_random(folder / "base", lambda: deepseek_v3(**sizes), EXTRA_CONFIG["deepseek_v3"])
    quantise(folder / "base", folder / "int4")
    shutil.rmtree(folder / "base")
    dequantise(folder / "int4", folder / "float32", "float32")
    return {}


def run(folder: Path, form: str, tokens: int) -> dict[str, Any]:
    from lora_moe_rl.adapters.shards import assemble
    from lora_moe_rl.trainer.worker import TrainerWorker
    from lora_moe_rl.verify.inputs import random_adapter, random_batch
    from lora_moe_rl.verify.ranks import free_address, spec_of

    model = folder / form
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "trainer": {"device": "cpu", "dtype": "float32", "micro_batch_tokens": tokens},
            "adapter": {"rank": 8},
        }
    )
    spec = spec_of(model, config)
    _megatron_imported(config)
    before = status_bytes("RssAnon")
    worker = TrainerWorker(config, spec, model, rank=0)
    worker.start(free_address(), threads=1)
    grown = status_bytes("RssAnon") - before
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec, samples=max(1, tokens // LENGTHS[1]), lengths=LENGTHS)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        _, _, shards = worker.gradients(batch, table)
        seconds.append(time.perf_counter() - started)
    scored = worker.score([ids.tolist() for ids in batch.token_ids], table, True)
    figures = _held(worker, model) | {
        "anon": grown,
        "peak": status_bytes("VmHWM"),
        "seconds": min(seconds),
    }
    numbers = {"logprobs": np.concatenate(scored)} | assemble(spec.tensor_shapes, shards)
    return figures | _compared(folder / "numbers.npz", form, numbers)


def _megatron_imported(config: RunConfig) -> None:
    """Imports are no memory of a base."""
    from lora_moe_rl.trainer.device import Device

    Device.choose(config.trainer).prepare(threads=1)
    from lora_moe_rl.trainer import bridge, engine  # noqa: F401

    bridge.load()


def _held(worker, model: Path) -> dict[str, int]:
    """Bytes of the base: `experts` and the `rest` as they are held, `stored` of the experts in the
    checkpoint; `scratch` of what is dequantised into."""
    from lora_moe_rl.files.untrusted import SafeWeights
    from lora_moe_rl.trainer import packed_experts

    held = packed_experts.held(worker.engine.chunks)
    parameters = {
        name: parameter.nbytes
        for chunk in worker.engine.chunks
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    }
    experts = sum(size for name, size in parameters.items() if ".mlp.experts." in name)
    with SafeWeights.open(model) as weights:
        stored = sum(entry.nbytes for entry in weights.entries() if ".experts." in entry.name)
    return {
        "experts": held["packed"] + experts,
        "rest": sum(parameters.values()) - experts,
        "scratch": held["scratch"],
        "stored": stored,
    }


def _compared(path: Path, form: str, numbers: dict[str, np.ndarray]) -> dict[str, float]:
    if form == "int4":
        np.savez(path, **numbers)  # pyright: ignore[reportArgumentType]
        return {}
    other = np.load(path)
    off = {name: float(np.abs(value - other[name]).max()) for name, value in numbers.items()}
    size = {name: float(np.abs(value).max()) for name, value in numbers.items()}
    gradients = [name for name in numbers if name != "logprobs"]
    return {
        "logprobs_off": off["logprobs"] / size["logprobs"],
        "gradients_off": max(off[n] for n in gradients) / max(size[n] for n in gradients),
    }


def main(what: str, folder: Path, argument: str) -> None:
    if what == "make":
        print(json.dumps(make(folder, json.loads(argument))))
    else:
        print(json.dumps(run(folder, what, int(argument))))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
