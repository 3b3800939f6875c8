"""Mend for vLLM 0.31.0 on the CPU: its processes are forked from the one that starts them.

vLLM spawns its engine core, and the core its workers (`vllm/v1/engine/utils.py`,
`vllm/v1/executor/multiproc_executor.py`): each imports torch and vLLM anew, 17 s of a core. Here
they are forked once these are imported. vLLM asks for spawn because CUDA and OpenMP do not survive
a fork. There is no CUDA here, and one thread makes no OpenMP team: with more, vLLM spawns as usual.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch
from vllm.v1.engine import utils as core_processes
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor import multiproc_executor as worker_processes
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker import cpu_worker  # noqa: F401  vLLM imports it by name, after the fork

from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/forked.py"


class EngineFork(ForkProcess):
    """A process of vLLM's that computes with one thread."""

    def run(self) -> None:
        """Begins as a spawned process does: stock signals, no socket of its parent's, its name."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _let_go_of_sockets()
        if ray := sys.modules.get("ray._raylet"):
            # vLLM means to name the process itself, but finds no room where Ray wrote a title.
            ray.setproctitle(f"VLLM::{self.name}")
        torch.set_num_threads(1)
        super().run()


class EngineForkContext(ForkContext):
    Process = EngineFork


def install(threads: int) -> None:
    """vLLM's processes, of `threads` each, are forked from now on. Raises ConfigError when vLLM is
    not the version we know."""
    require_version("vllm", WHO)
    for module in (core_processes, worker_processes):
        require_attributes(module, ("get_mp_context",), WHO)
        require_parameters(module.get_mp_context, (), WHO)
    require_attributes(EngineCoreProc, ("run_engine_core",), WHO)
    require_parameters(WorkerProc.make_worker_process, ("vllm_config", "local_rank"), WHO)
    require_attributes(WorkerProc, ("worker_main",), WHO)
    if threads > 1:
        return
    for module in (core_processes, worker_processes):
        module.get_mp_context = _context


def _context() -> Any:
    # The spawn that vLLM's CPU platform has asked for by now keeps the rest of vLLM from asking
    # Ray, of which a fork has only the memory, whether this is an actor.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return EngineForkContext()


def _let_go_of_sockets() -> None:
    """Puts /dev/null in the place of each socket: Ray and our own pipes take an open one for a sign
    of life of the parent. What still refers to one by number then closes /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself is closed
            if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.dup2(null, descriptor)
    os.close(null)
