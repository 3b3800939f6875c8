"""The stages, in the order in which they run, and how long each may take.

A stage is a module here with a function `run(parts, device, *options)`, which makes its parts; on
the device cpu with sizes that a CPU can take, so that all of its code has been run before a GPU is
held.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAINER = ("megatron.core", "megatron.bridge")
ENGINE = ("vllm",)


@dataclass(frozen=True)
class Stage:
    """`needs`: modules that must be installed; `shows`: what one reads in its result."""

    module: str
    limit_s: float
    shows: str
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


# What says most about a run first: a machine may be lent for half an hour, in calls of ten minutes.
# docs/gpu.md has the calls, whose limits fit.
STAGES = {
    "probe": Stage("probe", 90, "the machine, its versions and its ceilings"),
    "kernels": Stage(
        "tests", 150, "the Triton kernels against float64", ("pytest",), ("test_kernels.py",)
    ),
    "demo": Stage(
        "demo",
        300,
        "six steps of the demo: mismatch with replay and without",
        (*TRAINER, *ENGINE, "ray"),
    ),
    "engine": Stage("engine", 240, "vLLM without graphs: versions, logprobs, speed", ENGINE),
    "trainer": Stage(
        "tests",
        210,
        "a trainer step against the CPU, and what in it waits for the device",
        ("pytest", *TRAINER),
        ("test_trainer_step.py", "test_no_sync.py"),
    ),
    "slots": Stage("slots", 90, "ways of writing a version into slots", ENGINE),
    "slices": Stage(
        "slices",
        240,
        "layers at full width: memory beside the plan's, MFU, longest kernels",
        TRAINER,
        ("qwen3_30b_a3b:8:none", "deepseek_v3:3:none", "kimi_k2:2:none"),
    ),
    "kernel_bench": Stage("benches", 120, "`bench kernels`", ("triton",), ("kernels",)),
    "refit": Stage("benches", 180, "`bench refit`", (*ENGINE, "ray"), ("refit",)),
    "held": Stage(
        "tests",
        300,
        "memory of one process that another maps: the base, held once, and a version of an adapter",
        ("pytest",),
        ("test_held.py", "test_marlin.py", "test_channels.py"),
    ),
    "graphs": Stage("engine", 420, "the same with CUDA graphs", ENGINE, ("graphs",)),
    "large": Stage(
        "slices",
        400,
        "as many layers as one GPU holds, all activations computed again",
        TRAINER,
        ("qwen3_30b_a3b:48:full", "deepseek_v3:5:full", "kimi_k2:4:full"),
    ),
}
