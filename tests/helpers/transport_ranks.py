"""Trainer ranks that have offered a version, in this process or one of their own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from published_configs import QWEN3_30B_A3B, shrunk
from refit_ranks import make_layouts, make_senders

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, RefitConfig, TrainerConfig
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.refit.plan import EngineLayout
from lora_moe_rl.refit.transports import Channel, channel, from_json

TWO = TrainerConfig(world_size=2, pp=2)
ENGINE = EngineLayout(slot_rank=8, tp=2)
VERSION = 12


def make_channel(transport: str, directory: Path | None = None, timeout_s: float = 20) -> Channel:
    path = None if directory is None else str(directory)
    return channel(RefitConfig(transport=transport, directory=path, timeout_s=timeout_s))


def publish(channel: Channel, sent: list[SentPart]) -> None:
    async def offered() -> list[SentPart]:
        return sent

    asyncio.run(channel.published(offered))


def all_sent(channel: Channel, dtype="float32", device="cpu"):
    """Two trainer ranks with adapters on `device` that have offered a version, and it is published:
    (layouts, senders, parts)."""
    shape = ModelShape.from_hf_config(shrunk(QWEN3_30B_A3B) | {"num_hidden_layers": 2})
    spec = AdapterSpec.build(shape, AdapterConfig(rank=3, alpha=4))
    generator = np.random.default_rng(0)
    tensors = {
        name: generator.standard_normal(shape, dtype=np.float32)
        for name, shape in spec.tensor_shapes.items()
    }
    layouts = make_layouts(spec, TWO, ENGINE, dtype)
    senders = make_senders(layouts, spec, tensors, TWO, channel, device)
    sent = [sender.send(VERSION) for sender in senders]
    publish(channel, sent)
    return SimpleNamespace(layouts=layouts, senders=senders, sent=sent)


def offer_and_wait(pipe, transport: str = "distributed") -> None:
    """A trainer process: offers a version, and the next one when it is told to, then lives until it
    is killed."""
    all_ = all_sent(make_channel(transport))
    pipe.send((all_.layouts, all_.sent))
    pipe.recv()
    pipe.send([sender.send(VERSION + 1) for sender in all_.senders])
    time.sleep(60)


@contextmanager
def offering(work: Callable[..., None], *arguments) -> Iterator[SimpleNamespace]:
    """A process that does `work` with a pipe, and tells at first of layouts and parts: killed at
    the end, if it has not ended by then."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments))
    process.start()
    try:
        assert ours.poll(120), "the trainer process did not start"
        layouts, sent = ours.recv()
        yield SimpleNamespace(process=process, pipe=ours, layouts=layouts, sent=sent)
    finally:
        process.kill()
        process.join()


def stop(process: multiprocessing.Process) -> None:
    """A child of this process. Returns when all of its threads stand: until the signal is seen by
    one of them the others go on."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def make(kind: str, tmp_path) -> Channel:
    """Told to another process and back, as in a run."""
    return from_json(make_channel(kind, tmp_path / "refit").to_json())
