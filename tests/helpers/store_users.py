"""Processes that write, map and leave a base in a file; by themselves, so that they can be forked
from a server that has no threads, and not from the tests' own process, which has."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.base import owner
from lora_moe_rl.base.contents import Contents, Kept
from lora_moe_rl.base.store import open_store

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["lora_moe_rl.verify.preload"])  # as trainer ranks want it

KEY = {"model": "a", "vllm": "vllm 1"}
CONTENTS = Contents(
    KEY, {n: Kept("float32", s) for n, s in (("one", (3, 5)), ("two", (2, 2000)), ("three", (1,)))}
)


def values(name: str) -> torch.Tensor:
    shape = CONTENTS.tensors[name].shape
    return torch.arange(torch.Size(shape).numel()).view(shape) + len(name) * 0.5


def fill(name: str, out: torch.Tensor) -> None:
    out.copy_(values(name))


def no_fill(name: str, out: torch.Tensor) -> None:
    raise AssertionError("it is there already")


def read(folder: Path) -> None:
    open_store(folder, CONTENTS, no_fill)["two"][1, 7].item()


def overwrite(folder: Path) -> None:
    open_store(folder, CONTENTS, fill)["two"][1, 7].fill_(0.0)


def write(folder: Path, written: Path) -> None:
    """Notes in `written` what it fills; its exit code is 1 when it maps anything else."""

    def slowly(name: str, out: torch.Tensor) -> None:
        with open(written, "a") as file:
            file.write(name + "\n")
        time.sleep(0.05)
        fill(name, out)

    store = open_store(folder, CONTENTS, slowly)
    os._exit(int(not torch.equal(store["two"], values("two").float())))


def die(folder: Path) -> None:
    """Over the first tensor."""

    def kill(name: str, out: torch.Tensor) -> None:
        out.fill_(9.0)
        os.kill(os.getpid(), signal.SIGKILL)

    open_store(folder, CONTENTS, kill)


def use(folder: Path, ready: Any, release: Any) -> None:
    open_store(folder, CONTENTS, fill)
    ready.set()
    release.wait(60)


def own_and_die(root: Path, ready: Any, release: Any) -> None:
    """Killed while another process, which it has started, uses what it owns."""
    with owner.owned(str(root)) as folder:
        user = multiprocessing.get_context("fork").Process(
            target=use, args=(folder, ready, release)
        )
        user.start()
        ready.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
