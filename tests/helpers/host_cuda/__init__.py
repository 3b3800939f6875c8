"""A GPU whose memory is the host's and whose kernels are the CPU's, on a machine without one.

torch's dispatcher, its caching allocator, vLLM's CUDA build and Triton go their way of a GPU, on
the runtime and the driver of `noop_cuda`; where each comes to launch a kernel, the numbers are
computed on the same memory:

    operators.py     torch's own: the CPU's kernel of each
    interpreter.py   Triton's: its interpreter
    vllm_ops.py      vLLM's own, and flash-attention: what each does, in torch
    nccl.py          NCCL's groups: gloo's, of tensors on a GPU alone

A kernel that is launched all the same ends the process, with its stack. Not to be seen here: what
waits, how long anything takes, CUDA's own kernels and libraries, graphs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import noop_cuda

VARIABLE = "HOST_CUDA"
SITE = str(Path(__file__).with_name("site"))
# Triton's interpreter takes seconds for a batch, and vLLM tries the largest one first.
ROLLOUT = {
    "max_num_seqs": 8, "enforce_eager": True, "gpu_memory_utilization": 0.3,
    "engine_args": {
        "max_num_batched_tokens": 64, "kernel_config": {"enable_flashinfer_autotune": False}
    },
}  # fmt: skip


def here() -> bool:
    """Whether this process has such a GPU."""
    return VARIABLE in os.environ


def without_vllm() -> str:
    """Why there can be no engine of vLLM's CUDA build here, '' if there can."""
    from lora_moe_rl.upstream.versions import installed

    return "" if installed("vllm") else "needs vLLM's CUDA build: make setup GPU=1"


def environment(folder: Path, gib: int = 6, gpus: int = 1) -> dict[str, str]:
    """Of a process with so many such GPUs, of so much memory each. `folder`: for what is
    compiled."""
    given = noop_cuda.environment(folder)
    return given | {
        VARIABLE: "1",
        "NOOP_CUDA_LOUD": "1",
        "NOOP_CUDA_GIB": str(gib),
        "NOOP_CUDA_DEVICES": str(gpus),
        "TRITON_INTERPRET": "1",
        # Of vLLM's ways to reduce over ranks torch's groups are left.
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_NCCL_SO_PATH": "none",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join([SITE, given["PYTHONPATH"]]),
    }


def run(folder: Path, *arguments: str, timeout_s: float, gpus: int = 1) -> str:
    """What `python *arguments` prints there."""
    child = subprocess.run(
        [sys.executable, *arguments], env=environment(folder, gpus=gpus), capture_output=True,
        text=True, timeout=timeout_s,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-6000:]
    return child.stdout
