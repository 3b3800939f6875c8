"""The least that Triton can be asked: a kernel of one line."""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl


@triton.jit
def add_one(x, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + n, tl.load(x + n, mask=n < N) + 1, mask=n < N)


def launch(device: str) -> dict[str, float]:
    """Seconds of the first launch, which compiles the kernel and what launches it, and of a second
    one. Raises RuntimeError when the kernel does something else."""
    x = torch.zeros(1000, dtype=torch.int32, device=device)
    taken = {}
    for name in ("first", "again"):
        started = time.perf_counter()
        add_one[(triton.cdiv(len(x), 256),)](x, len(x), BLOCK=256)
        total = x.sum().item()
        taken[name] = time.perf_counter() - started
    if total != 2 * len(x):
        raise RuntimeError(f"a kernel that adds 1 twice to {len(x)} zeros leaves a sum of {total}")
    return taken
