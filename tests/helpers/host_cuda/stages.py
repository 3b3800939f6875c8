"""Stages of `lora-moe-rl bench gpu` on such a GPU, with the sizes that they have on a CPU.

    python -m host_cuda.stages probe slots slices=qwen3_30b_a3b:2:none

What follows `=` are a stage's options, else it has its own. The last line is what each stage has
found, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import host_cuda
from lora_moe_rl.bench import kernels, refit, refit_model
from lora_moe_rl.bench.gpu.parts import Parts
from lora_moe_rl.bench.gpu.stages import STAGES, benches, engine, probe, slices, slots

SIZES = {
    benches: ("KERNEL_SIZES", "REFIT_ROUNDS"),
    engine: ("WIDE_LAYERS", "STREAMS", "RESPONSE"),
    kernels: ("TOKENS", "RANKS", "CODEC_TOKENS"),
    probe: ("GROUPED", "HOST_BYTES"),
    slices: ("SEQUENCES", "TOKENS"),
    slots: ("LAYERS",),
}


def shrink() -> None:
    for module, names in SIZES.items():
        for name in names:
            sizes = getattr(module, name)
            sizes["cuda"] = sizes["cpu"]
    probe.ATTENTION = {}  # each of torch's kernels by itself, of which none is here
    wide = slices.hf_config
    slices.hf_config = engine.hf_config = lambda name, layers, _: wide(name, layers, "cpu")
    refit_model.LAYERS, refit_model.EXPERTS = 2, 16  # of which the interpreter takes each by itself
    # A first token takes a second here.
    refit.STREAMS, refit.STREAM_ROUNDS, refit.WINDOW_S = 1, 1, 10.0
    refit._eager = lambda: host_cuda.ROLLOUT
    # A process of its own would not have these sizes.
    slices.apart = lambda _, job, *arguments, **limits: job(*arguments)


def main(*stages: str) -> dict[str, Any]:
    shrink()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in stages:
            name, _, options = one.partition("=")
            stage, parts = STAGES[name], Parts(Path(folder) / f"{name}.json")
            module = import_module(f"lora_moe_rl.bench.gpu.stages.{stage.module}")
            module.run(parts, "cuda", *(options.split(",") if options else stage.options))
            found[name] = parts.values
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
