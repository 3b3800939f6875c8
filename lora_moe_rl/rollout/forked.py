"""Mend for vLLM 0.31.0 on the CPU: its processes are forked from the one that starts them.

vLLM spawns its engine core (of each data-parallel rank, and what coordinates these), and the core
its workers (`vllm/v1/engine/utils.py`, `vllm/v1/engine/coordinator.py`,
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
from collections.abc import Set
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess

import torch

from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/forked.py"


def install(threads: int) -> None:
    """vLLM's processes, of `threads` each, are forked from now on. Raises ConfigError when vLLM is
    not the version we know."""
    require_version("vllm", WHO)
    from vllm.v1.engine import coordinator
    from vllm.v1.engine import utils as cores
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor import multiproc_executor as workers
    from vllm.v1.worker import cpu_worker  # noqa: F401  vLLM imports it by its name, after a fork

    require_attributes(EngineCoreProc, ("run_engine_core",), WHO)
    require_parameters(workers.WorkerProc.make_worker_process, ("vllm_config", "local_rank"), WHO)
    for module in (cores, coordinator, workers):
        require_attributes(module, ("get_mp_context",), WHO)
        require_parameters(module.get_mp_context, (), WHO)
        if threads == 1:
            module.get_mp_context = EngineForkContext
    # The rest of vLLM would ask Ray, of which a fork has only the memory, whether it may fork.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


class EngineFork(ForkProcess):
    """A process that computes with one thread and begins as a spawned one does: stock signals, a
    name of its own, and of its parent's sockets only those that it was given."""

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        given = {arg.fileno() for arg in self._kwargs.values() if isinstance(arg, Connection)}
        _let_go(keep=given)
        if ray := sys.modules.get("ray._raylet"):
            # vLLM means to name the process itself, but finds no room where Ray wrote a title.
            ray.setproctitle(f"VLLM::{self.name}")
        torch.set_num_threads(1)
        super().run()


class EngineForkContext(ForkContext):
    Process = EngineFork


def _let_go(keep: Set[int]) -> None:
    """Puts /dev/null in the place of each socket, standard streams aside: that one is open is to
    Ray a sign of life of the parent. They are not closed, so that nothing takes over a number by
    which inherited code still knows them. Pipes stay: one of them is this process's own sign of
    life to its parent."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            tie = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
            if tie and descriptor > 2 and descriptor not in keep:
                os.dup2(null, descriptor)
    os.close(null)
