"""Whether this machine can hold a run: GPUs and memory by the plan, room on the disk, a port.

What is found here warns and does not refuse: a plan is an estimate, and Ray, which counts what a
cluster has, refuses what it lacks (`cluster/placement.py`). A disk without room for one checkpoint
is refused.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.base import choose
from lora_moe_rl.cluster.bundles import NO_ENGINE, lacks_gpu
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.planner import plan as plans
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import PACKED, Format, find
from lora_moe_rl.planner.hardware import GIB, Hardware
from lora_moe_rl.planner.plan import Assumed, RunPlan
from lora_moe_rl.run import cores
from lora_moe_rl.run.room import check_room

QUERY_S = 5.0
CONNECT_S = 3.0


@dataclass(frozen=True)
class Found:
    text: str
    warnings: list[str]


def look(config: RunConfig, model_dir: Path, spec: AdapterSpec, held_once: bool) -> Found:
    """`held_once`: whether trainer and engines share their base. Raises ConfigError when
    the disk has no room for one checkpoint, and for nothing else that the machine lacks."""
    gpus = gpu_memory()
    warnings: list[str] = []
    if "RAY_ADDRESS" in os.environ:
        text = f"joins the cluster {os.environ['RAY_ADDRESS']}"
        warnings += _unreachable(os.environ["RAY_ADDRESS"])
    elif config.trainer.device == "cuda" and not gpus:
        text = "no GPU"
        warnings.append("trainer.device=cuda, and nvidia-smi finds no GPU here")
    else:
        try:
            text, problem = _memory(config, model_dir, gpus, held_once)
        except LoraMoeRlError as error:  # weights of a form that the planner cannot size
            text, problem = "memory not planned", [f"memory was not planned: {error}"]
        warnings += problem
        if lacks_gpu(config, bool(gpus)):
            warnings.append(f"nvidia-smi finds no GPU here, and {NO_ENGINE}")
        if not gpus:
            text += f"; {cores.used(config, len(os.sched_getaffinity(0)))}"
    disk, problem = check_room(config, spec)
    return Found(f"{text}; {disk}", [*warnings, *problem, *_loopback()])


def _memory(
    config: RunConfig, model_dir: Path, gpus: list[float], held_once: bool
) -> tuple[str, list[str]]:
    if not gpus:
        plan = _plan(config, model_dir, Hardware(1), "float32")
        return _on_the_cpu(config, plan, _saved(config, plan) if held_once else 0)
    host = psutil.virtual_memory().total / GIB
    hardware = Hardware(
        len(gpus), gpu_memory=min(gpus), gpus_per_node=max(8, len(gpus)), host_memory=host
    )
    plan = _plan(config, model_dir, hardware, "bf16")
    return f"{len(gpus)} GPUs of {min(gpus):.0f} GiB", [*plan.problems, *plan.warnings]


def gpu_memory() -> list[float]:
    """GiB of each GPU of this machine, as nvidia-smi says; empty when it says nothing."""
    try:
        return [float(line) / 1024 for line in _asked("memory.total")]
    except ValueError:
        return []


def gpu_names() -> list[str]:
    """What nvidia-smi calls each GPU of this machine; empty when it says nothing."""
    return _asked("name")


def _asked(what: str) -> list[str]:
    """nvidia-smi's lines, one a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in answer.stdout.splitlines() if line.strip()]


def _plan(config: RunConfig, model_dir: Path, hardware: Hardware, auto: Format) -> RunPlan:
    """`auto`: what trainer.dtype=auto is here."""
    facts = find(str(model_dir))
    weights = auto
    if config.trainer.dtype != "auto":
        weights = "float32" if config.trainer.dtype == "float32" else "bf16"
    served = facts.checkpoint if facts.checkpoint in PACKED else weights
    lengths = Lengths(config.max_prompt_tokens, config.max_response_tokens)
    return plans.make(facts, config, Assumed(hardware, facts.in_trainer(weights), served, lengths))


def _saved(config: RunConfig, plan: RunPlan) -> int:
    """Bytes of the base that would be there once more for each copy but the one that all share:
    those of the trainer's data-parallel ranks and of each engine."""
    shape, trainer, engines = plan.facts.shape, config.trainer, config.rollout.engines
    form = plan.facts.checkpoint if plan.facts.checkpoint in PACKED else None
    stages, ranks = trainer.pp, trainer.world_size
    experts = choose.expert_bytes(config, shape, form) * (
        ranks // (stages * trainer.ep * trainer.etp) + engines - 1
    )
    dense = choose.dense_bytes(config, shape, form) * (ranks // (stages * trainer.tp) + engines - 1)
    return experts + dense


def _on_the_cpu(config: RunConfig, plan: RunPlan, saved: int) -> tuple[str, list[str]]:
    """All ranks and engines share the machine's memory. `saved`: what they hold once."""
    trainer = sum(c.ranks * c.tensors for c in plan.classes) - saved
    engines = 0
    if plan.engine is not None:
        rollout, engine = config.rollout, plan.engine.weights + plan.engine.slots
        caches = rollout.dp * int(rollout.cpu_kv_cache_gib * GIB)
        engines = rollout.engines * (rollout.ranks * engine + caches)
    memory = psutil.virtual_memory().total
    text = (
        f"CPU: about {(trainer + engines) / GIB:.1f} GiB of weights, adapters and caches, of "
        f"{memory / GIB:.1f} GiB of memory"
    )
    return text, [f"{text}; use a smaller model or fewer ranks"] * (trainer + engines > memory)


def _loopback() -> list[str]:
    """Trainer ranks and Ray find each other by ports that the system chooses."""
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
    except OSError as error:
        return [f"no port can be had on 127.0.0.1: {error}"]
    return []


def _unreachable(address: str) -> list[str]:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return []  # `auto`: Ray looks for it
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return [f"RAY_ADDRESS={address} cannot be reached: {error}"]
    return []
