"""`lora-moe-rl bench transports`: a part of a version from one process into another, by each
transport, beside a plain copy."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

from lora_moe_rl.bench import report
from lora_moe_rl.bench.report import Result, busy_cores, cores, temporary
from lora_moe_rl.config import RefitConfig
from lora_moe_rl.config.options import positive, positives, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.parts import Entry, PartLayout, SentPart, digest
from lora_moe_rl.refit.plan import Box
from lora_moe_rl.verify.report import table

ABOUT = """\
One trainer rank and one engine worker, processes on this machine, on the CPU: a part that the
worker needs the whole of is offered and brought over, version by version. Seconds from the offer
until the worker has the bytes in an array of its own, medians, without the checks that are the same
for all; a version counts only when its bytes are the sender's. NIXL is measured as UCX has it on
one machine, where it reads the other process's memory, and over TCP, as between machines.
"""
MIB, VALUES = 2**20, 4  # bytes of a float32
# By row: the transport, and what it is told through the environment.
ROWS = {
    "shm": ("shm", {}),
    "nixl": ("nixl", {}),
    "nixl over TCP": ("nixl", {"UCX_TLS": "tcp"}),
    "distributed": ("distributed", {}),
    "directory": ("directory", {}),
}
TIMEOUT_S = 120.0


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench transports", ABOUT)
    parser.add_argument(
        "--mib", type=positives, default=[16, 128, 512], help="sizes of a part (16,128,512)"
    )
    parser.add_argument("--rounds", type=positive, default=7, help="versions of each size (7)")
    options = parser.parse_args(argv)
    busy = busy_cores()
    lacking = {row: transports.lacking(channel_of(name)) for row, (name, _) in ROWS.items()}
    lacking = {row: modules for row, modules in lacking.items() if modules}
    there = [row for row in ROWS if row not in lacking]
    rows = [measured(row, mib, options.rounds) for mib in options.mib for row in there]
    for row in rows:
        (shm,) = (one for one in rows if one["mib"] == row["mib"] and one["transport"] == "shm")
        row["of a copy"] = row["seconds"] / shm["copy"]
    result = {"rows": rows, "lacking": lacking, "cores": cores(), "busy_cores_before": busy}
    report.conclude(result | {"goals": {}}, options.json, parts)
    return 0


def channel_of(name: str, folder: str = "/nowhere") -> transports.Channel:
    """`folder`: of the transport that goes through one."""
    directory = folder if name == "directory" else None
    settings = RefitConfig(transport=name, directory=directory, timeout_s=TIMEOUT_S)
    return transports.channel(settings)


def measured(row: str, mib: int, rounds: int) -> Result:
    name, variables = ROWS[row]
    layout = layout_of(mib * MIB)
    with temporary() as folder:
        channel = channel_of(name, f"{folder}/refit")
        told = (channel.to_json(), layout)
        with process(sending, told, variables) as sender, process(taking, told, variables) as taker:
            found = [_version(channel, sender, taker, n) for n in range(rounds + 1)]
    seconds, copies = ([one[i] for one in found[1:]] for i in (0, 1))  # the first connects
    return {
        "transport": row,
        "mib": mib,
        "first": found[0][0],
        "seconds": median(seconds),
        "copy": median(copies),
        "GB/s": mib * MIB / median(seconds) / 1e9,
    }


def _version(
    channel: transports.Channel, sender: Connection, taker: Connection, version: int
) -> tuple[float, float]:
    """Seconds that it took, and those of a plain copy in the worker."""
    sender.send(version)
    expected, offered, sent = answer(sender)

    async def parts() -> list[SentPart]:
        return [sent]

    started = time.perf_counter()
    asyncio.run(channel.published(parts))
    published = time.perf_counter() - started
    taker.send(sent)
    got, taken, copied = answer(taker)
    channel.keep([version])
    if got != expected:
        raise BenchmarkError(f"refit.transport={channel.settings.transport}: other bytes arrived")
    return offered + published + taken, copied


def layout_of(nbytes: int) -> PartLayout:
    """One box, for worker 0."""
    box = Box((0, 0), (1, nbytes // VALUES))
    entry = Entry("layers.0.attention.qkv", "A", "qkv", (0,), box, (0,), 0)
    return PartLayout(0, "float32", nbytes, (entry,))


def sending(pipe: Connection, channel_json: str, layout: PartLayout) -> None:
    """A trainer rank: other values for each version that it is told of."""
    import torch

    outgoing = transports.from_json(channel_json).outgoing(layout, "127.0.0.1")
    memory = outgoing.memory(layout.nbytes, torch.device("cpu"))
    assert isinstance(memory, np.ndarray)
    values = memory.view(np.float32)
    values[:] = np.random.default_rng(0).standard_normal(len(values), dtype=np.float32)
    while (version := pipe.recv()) is not None:
        values += 1
        sum_ = digest(memory)
        started = time.perf_counter()
        sent = outgoing.offer(SentPart(0, version, "", layout.nbytes, (sum_,)))
        pipe.send((sum_, time.perf_counter() - started, sent))


def taking(pipe: Connection, channel_json: str, layout: PartLayout) -> None:
    """An engine worker."""
    incoming = transports.from_json(channel_json).incoming(0)
    slot, other = (np.ones(layout.nbytes, np.uint8) for _ in range(2))
    while (sent := pipe.recv()) is not None:
        started = time.perf_counter()
        memory = incoming.open(layout, sent)
        np.copyto(slot, memory)
        taken = time.perf_counter()
        np.copyto(other, slot)
        copied = time.perf_counter()
        pipe.send((digest(slot), taken - started, copied - taken))


@contextmanager
def process(work: Any, told: Sequence[Any], variables: dict[str, str]) -> Iterator[Connection]:
    """A process that does `work`, with a pipe to it, until it is told None."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        child = context.Process(target=work, args=(theirs, *told), daemon=True)
        child.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()
    try:
        yield ours
        with suppress(OSError):  # it has ended
            ours.send(None)
        child.join(TIMEOUT_S)
    finally:
        child.kill()
        child.join()


def answer(pipe: Connection) -> tuple[Any, ...]:
    try:
        if pipe.poll(TIMEOUT_S):
            return pipe.recv()
    except (EOFError, OSError):
        raise BenchmarkError("a process of the benchmark has ended; its error is above") from None
    raise BenchmarkError(f"no answer within {TIMEOUT_S:g} s")


def parts(result: Result) -> Iterable[Any]:
    shown = table(["transport", "MiB", "ms", "GB/s", "of a copy", "first, ms"])
    for row in result["rows"]:
        shown.add_row(
            row["transport"],
            str(row["mib"]),
            f"{1e3 * row['seconds']:.1f}",
            f"{row['GB/s']:.2f}",
            f"{row['of a copy']:.1f}",
            f"{1e3 * row['first']:.0f}",
        )
    yield shown
    for row, modules in result["lacking"].items():
        yield f"{row}: not measured, {', '.join(modules)} is not installed"
