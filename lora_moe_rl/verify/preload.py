"""Imported once in the process from which CPU ranks are forked: Megatron and transformers take
some fifteen seconds of a core, which every rank would pay again."""

from __future__ import annotations

import contextlib
import os

from lora_moe_rl.trainer.environment import CPU_ENVIRONMENT, without_trackers
from lora_moe_rl.upstream.uncollected import uncollected

os.environ.update(CPU_ENVIRONMENT)
without_trackers()


def _import_all() -> None:
    import importlib
    import threading

    from lora_moe_rl.trainer import megatron_on_cpu

    megatron_on_cpu.install()
    for name in ("bridge", "engine", "local_modules", "model", "state", "update"):
        importlib.import_module(f"lora_moe_rl.trainer.{name}")
    importlib.import_module("lora_moe_rl.trainer.bridge").load()
    # Its default lock is a semaphore of the system, which a rank that ends would leave behind.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())


def _quietly(function) -> None:
    """What the imports have to say of missing packages is known and goes nowhere."""
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        # What cannot be imported ends the rank that needs it, with a message; here it would end the
        # server without one.
        with contextlib.suppress(Exception):
            function()
    finally:
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


with uncollected():
    _quietly(_import_all)
