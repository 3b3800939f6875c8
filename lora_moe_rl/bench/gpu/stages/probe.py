"""The machine: what it is, which versions it has, and what it can do at most."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

from lora_moe_rl.bench.gpu.parts import Parts
from lora_moe_rl.bench.gpu.stages.demo import TINY
from lora_moe_rl.tiny.make import find_tiny
from lora_moe_rl.upstream.doctor import examine

GIB = 2**30
ASKED = "name,memory.total,driver_version,power.limit,clocks.max.sm"
TOOLS = ("gcc", "nvcc", "xz", "ncu", "nsys")
# Rows, experts, width in and out of the grouped matmul: one layer's gate and up of Qwen3-30B-A3B.
GROUPED = {"cuda": (65536, 128, 2048, 1536), "cpu": (256, 8, 64, 96)}
# A micro-batch's attention: sequences, heads, those of keys, tokens, width of keys and of values.
# On a GPU torch has several kernels for it, some of which are built anew for each shape.
ATTENTION = {
    "qwen3-30b": (8, 32, 4, 1000, 128, 128),
    "deepseek-v3": (2, 128, 128, 1000, 192, 128),
}
ON_CPU = (2, 4, 2, 40, 16, 16)
HOST_BYTES = {"cuda": GIB, "cpu": 2**22}


def run(parts: Parts, device: str) -> None:
    parts.part("triton", lambda: triton(device))
    parts.part("machine", machine)
    parts.part("packages", packages)
    parts.part("tiny_model", tiny_model)
    parts.part("ceilings", lambda: ceilings(device))
    parts.part("host_copies", lambda: host_copies(device))
    parts.part("grouped_mm", lambda: grouped_mm(device))
    parts.part("attention", lambda: attention(device))
    parts.part("imports", lambda: imports(device))


def triton(device: str) -> dict[str, float] | str:
    """Seconds of a first kernel: without a C compiler and Python.h none can be launched, and most
    stages fail."""
    if device == "cpu":
        return "not on a CPU"
    from lora_moe_rl.bench.gpu import first_kernel

    return first_kernel.launch(device)


def machine() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "gpus": _nvidia_smi(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": {"total": memory.total / GIB, "available": memory.available / GIB},
        "shm_gib": shutil.disk_usage("/dev/shm").total / GIB,
        "disk_free_gib": shutil.disk_usage(".").free / GIB,
        "tools": {name: shutil.which(name) for name in TOOLS},
    }


def packages() -> dict[str, str]:
    """What `lora-moe-rl doctor` finds."""
    return {one.name: f"{one.state}: {one.found}" for one in examine()}


def tiny_model() -> str:
    """Where the pre-trained model of the demo is, if it is there."""
    found = find_tiny(TINY)
    return str(found) if found else "not in the cache: the demo takes random weights"


def ceilings(device: str) -> dict[str, float]:
    from lora_moe_rl.bench.kernels import measure_ceilings

    return measure_ceilings(device)


def host_copies(device: str) -> dict[str, float]:
    """GB/s between memory and device: of pages that the driver has to copy first, and of locked
    ones, where there is a driver."""
    import torch

    from lora_moe_rl.bench.kernels import seconds

    size = HOST_BYTES[device]
    there = torch.empty(size, dtype=torch.uint8, device=device)
    pageable = torch.ones(size, dtype=torch.uint8)
    ways = {
        "pageable_to_device": lambda: there.copy_(pageable),
        "device_to_pageable": lambda: pageable.copy_(there),
    }
    if device == "cuda":
        pinned = pageable.pin_memory()
        ways["pinned_to_device"] = lambda: there.copy_(pinned, non_blocking=True)
        ways["device_to_pinned"] = lambda: pinned.copy_(there, non_blocking=True)
    return {name: size / seconds(way, device) / 1e9 for name, way in ways.items()}


def grouped_mm(device: str) -> dict[str, float]:
    """TFLOP/s of the frozen experts' linear, as the trainer calls it, and of torch's own call."""
    import torch

    from lora_moe_rl.bench.kernels import DTYPE, seconds
    from lora_moe_rl.kernels.grouped_linear import grouped_linear

    rows, experts, width, out = GROUPED[device]
    x = torch.randn(rows, width, device=device, dtype=DTYPE[device])
    weight = torch.randn(experts, out, width, device=device, dtype=DTYPE[device])
    counts = [rows // experts] * experts
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    ways = {
        "torch._grouped_mm": lambda: torch._grouped_mm(x, weight.mT, offs=ends),
        "grouped_linear": lambda: grouped_linear(x, weight, counts),
    }
    operations = 2 * rows * width * out
    return {name: operations / seconds(way, device) / 1e12 for name, way in ways.items()}


def attention(device: str) -> dict[str, dict[str, Any]]:
    """For each kind of attention, causal and, as behind shared prompts, with a mask: seconds
    forward and backward by what torch chooses, and by each of its kernels alone; or why one
    cannot."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    alone = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    found: dict[str, dict[str, Any]] = {}
    for name, shape in ATTENTION.items():
        for masked in (False, True):
            taken: dict[str, Any] = {}
            call = functools.partial(_attend, ON_CPU if device == "cpu" else shape, masked, device)
            taken["chosen"] = _firsts(call)
            for one in alone:
                with sdpa_kernel(getattr(SDPBackend, one)):
                    taken[one.lower()] = _firsts(call)
            found[f"{name}, masked" if masked else name] = taken
    return found


def _firsts(call: Callable[[int], float]) -> dict[str, float] | str:
    """Seconds of a first call, of a second one, and of the first with a few tokens more."""
    try:
        return {"first": call(0), "again": call(0), "other_shape": call(8)}
    except RuntimeError as error:  # none of the kernels that are allowed takes it
        return str(error)[:200]


def _attend(shape: tuple[int, ...], masked: bool, device: str, more: int) -> float:
    """Seconds of a forward and a backward, with so many tokens more."""
    import torch

    from lora_moe_rl.bench.kernels import DTYPE

    sequences, heads, of_keys, tokens, wide, of_values = shape
    tokens += more

    def draw(heads: int, width: int) -> torch.Tensor:
        made = torch.randn(sequences, heads, tokens, width, device=device, dtype=DTYPE[device])
        return made.requires_grad_()

    q, k, v = draw(heads, wide), draw(of_keys, wide), draw(of_keys, of_values)
    mask = q.new_zeros(sequences, 1, tokens, tokens).detach() if masked else None
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=heads != of_keys
    )
    out.sum().backward()
    wait()
    return time.perf_counter() - started


def imports(device: str) -> dict[str, float]:
    """Seconds until the trainer is imported."""
    from lora_moe_rl.config import TrainerConfig
    from lora_moe_rl.trainer.device import Device

    started = time.perf_counter()
    Device.choose(TrainerConfig(device=device)).prepare(threads=1)
    from lora_moe_rl.trainer import bridge

    bridge.load()
    return {"trainer": time.perf_counter() - started}


def _nvidia_smi() -> list[str]:
    """A line a GPU; none without the tool."""
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return said.stdout.strip().splitlines()
