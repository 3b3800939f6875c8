"""Mend for vLLM on the CPU: the cache of keys and values is given back, and taken again.

`AsyncLLM.release_kv_cache_memory` and `wake_up` do all on the CPU that they do on GPUs (they wait
until no request runs, and forget prefixes and their routes), and then ask the worker, which refuses
(`discard`) or only warns (`wake_up`): `vllm/v1/worker/cpu_worker.py`. Here the worker tells the
kernel that the pages of the cache are not needed. They are zero when they are touched again, and
take memory as far as they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.cpu_worker import CPUWorker

from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_cache.py"
CACHE = "kv_cache"


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Gives the pages back that lie whole in the storages of `tensors`."""
    libc = ctypes.CDLL(None, use_errno=True)
    spans = {
        (storage.data_ptr(), storage.nbytes())
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    for start, size in spans:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = max(0, (start + size - first) // mmap.PAGESIZE * mmap.PAGESIZE)
        asked = ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED
        if libc.madvise(*asked):
            number = ctypes.get_errno()
            raise OSError(number, f"madvise of the cache: {os.strerror(number)}")


def _discard(self: CPUWorker, tags: tuple[str, ...]) -> None:
    if set(tags) != {CACHE}:
        raise RuntimeError(f"{WHO} gives back {CACHE}, and was asked for {tags}")
    forget(self.model_runner.kv_caches)


def _wake_up(self: CPUWorker, tags: list[str] | None = None) -> None:
    """Touching a page is enough."""


def install() -> None:
    require_version("vllm", WHO)
    require_parameters(CPUWorker.discard, ("self", "tags"), WHO)
    require_parameters(CPUWorker.wake_up, ("self", "tags"), WHO)
    require_attributes(Executor, ("discard", "wake_up", "is_sleeping"), WHO)
    CPUWorker.discard = _discard
    CPUWorker.wake_up = _wake_up
