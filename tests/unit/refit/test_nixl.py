"""NIXL between processes, over TCP and over what UCX takes on one machine: bytes, versions, and
ends that are gone, that hang, that come back."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack

import numpy as np
import psutil
import pytest
import torch
from transport_ranks import VERSION, all_sent, make_channel, offer_and_wait, offering, stop

from lora_moe_rl.config import RefitConfig
from lora_moe_rl.errors import ConfigError, RefitError
from lora_moe_rl.refit import parts, transports
from lora_moe_rl.refit.transports import nixl

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def over_tcp(monkeypatch):
    """As between machines; UCX would read this machine's own memory. Of this process and those that
    it starts."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def start_trainer():
    with ExitStack() as started:
        yield lambda: started.enter_context(offering(offer_and_wait, "nixl"))


def read(worker, layout, sent, rank: int | None = None) -> np.ndarray:
    """The bytes that this worker takes, after their check. `rank`: of one that does not know it."""
    memory, rank = worker.open(layout, sent), worker.rank if rank is None else rank
    mine = [i for i, entry in enumerate(layout.entries) if rank in entry.targets]
    assert 0 < len(mine) < len(layout.entries)
    parts.check_received(layout, sent, memory, mine)
    spans = [layout.entries[i].span(layout.dtype) for i in mine]
    return np.concatenate([np.asarray(memory[span]) for span in spans])


def incoming(rank=0, timeout_s=20.0) -> nixl.Incoming:
    return nixl.Incoming(rank, timeout_s)


@pytest.mark.parametrize("way", ["tcp", "ucx's choice"])
def test_each_worker_reads_its_bytes_of_each_version_out_of_other_processes(
    start_trainer, way, monkeypatch
):
    if way == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    trainer = start_trainer()
    here = all_sent(make_channel("shm"))
    workers = [incoming(rank) for rank in (0, 1)]

    def compare(sent):
        for worker in workers:
            for layout, part, own in zip(trainer.layouts, sent, here.sent, strict=True):
                of_shm = read(make_channel("shm").incoming(0), layout, own, worker.rank)
                np.testing.assert_array_equal(read(worker, layout, part), of_shm)

    compare(trainer.sent)
    rooms = [worker.room for worker in workers]
    trainer.pipe.send("next version")
    sent = trainer.pipe.recv()
    assert {part.version for part in sent} == {VERSION + 1}
    compare(sent)
    assert all(one is worker.room for one, worker in zip(rooms, workers, strict=True))


def test_bytes_of_another_version_are_told_by_their_checksums():
    all_ = all_sent(make_channel("nixl"))
    layout, sent, worker = all_.layouts[1], all_.sent[1], incoming()
    read(worker, layout, sent)
    entry = next(entry for entry in layout.entries if 0 in entry.targets)
    all_.senders[1].buffer[entry.offset] ^= 1  # packed anew for another version
    with pytest.raises(RefitError, match=f"checksum of {entry.tensor} from trainer rank 1 differs"):
        read(worker, layout, sent)


def test_a_rank_that_is_gone_is_told_at_once_and_one_that_came_back_is_read(
    start_trainer, over_tcp
):
    trainer, worker = start_trainer(), incoming()
    expected = read(worker, trainer.layouts[1], trainer.sent[1])
    trainer.process.kill()
    trainer.process.join()
    started = time.monotonic()
    for one in (worker, worker, incoming()):
        with pytest.raises(
            RefitError, match="version 12: trainer rank 1 did not send its part; it is"
        ):
            one.open(trainer.layouts[1], trainer.sent[1])
    assert time.monotonic() - started < 15  # it is seen, not waited for
    again = start_trainer()
    np.testing.assert_array_equal(read(worker, again.layouts[1], again.sent[1]), expected)
    assert list(worker.peers) == [1]


def test_a_rank_that_hangs_is_given_up_and_what_it_may_still_write_to_is_not_used_again(
    start_trainer, over_tcp
):
    trainer, worker = start_trainer(), incoming(timeout_s=1)
    layout, sent = trainer.layouts[1], trainer.sent[1]
    expected = read(worker, layout, sent).copy()
    room = worker.room
    stop(trainer.process)
    with pytest.raises(RefitError, match="longer than refit.timeout_s=1 .no answer within 1 s"):
        worker.open(layout, sent)
    (late,) = nixl.LATE
    assert worker.room is None and late.room is room
    other = start_trainer()
    np.testing.assert_array_equal(read(worker, other.layouts[1], other.sent[1]), expected)
    assert not np.shares_memory(worker.room, room)
    room[:] = 0
    os.kill(trainer.process.pid, signal.SIGCONT)  # and now it answers
    time.sleep(0.5)
    np.testing.assert_array_equal(read(worker, layout, sent), expected)
    assert not nixl.LATE and room.any() and not np.shares_memory(worker.room, room)


def test_of_a_rank_that_hung_and_then_died_nothing_is_left(start_trainer, over_tcp):
    trainer, worker = start_trainer(), incoming(timeout_s=1)
    layout, sent = trainer.layouts[1], trainer.sent[1]
    read(worker, layout, sent)
    stop(trainer.process)
    for _ in range(2):
        with pytest.raises(RefitError, match="no answer within 1 s"):
            worker.open(layout, sent)
    assert len(nixl.LATE) == 2
    trainer.process.kill()
    trainer.process.join()
    again = start_trainer()
    read(worker, again.layouts[1], again.sent[1])
    assert nixl.LATE == []


def fetch_for_ever(pipe, layout, sent) -> None:
    worker = incoming()
    while True:
        read(worker, layout, sent)
        pipe.send("read")


def test_a_worker_that_is_killed_while_it_reads_costs_nobody_anything(over_tcp):
    all_ = all_sent(make_channel("nixl"))
    ours, theirs = SPAWN.Pipe()
    reader = SPAWN.Process(target=fetch_for_ever, args=(theirs, all_.layouts[1], all_.sent[1]))
    reader.start()
    assert ours.poll(60)
    reader.kill()
    reader.join()
    worker = incoming(1)
    for layout, sent in zip(all_.layouts, all_.sent, strict=True):
        read(worker, layout, sent)


def test_nobody_who_waits_keeps_a_core_busy():
    all_, worker = all_sent(make_channel("nixl")), incoming()
    read(worker, all_.layouts[0], all_.sent[0])
    started = time.process_time()
    time.sleep(2)
    assert time.process_time() - started < 0.5  # three agents of NIXL's default take 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_a_device_are_read_into_memory_of_a_device(dtype, monkeypatch):
    """Without a GPU: tensors instead of arrays, and their checksums."""
    monkeypatch.setattr(nixl, "host_memory", lambda n: torch.zeros(n, dtype=torch.uint8))
    there = all_sent(make_channel("nixl"), dtype)
    monkeypatch.undo()
    here, worker = all_sent(make_channel("shm"), dtype), incoming()
    for layout, sent, own in zip(there.layouts, there.sent, here.sent, strict=True):
        assert isinstance(worker.open(layout, sent), torch.Tensor)
        of_shm = read(make_channel("shm").incoming(0), layout, own, 0)
        np.testing.assert_array_equal(read(worker, layout, sent), of_shm)
        there.senders[sent.source].buffer[layout.runs(0)[0][0]] ^= 1
        with pytest.raises(RefitError, match="differs from the sender's"):
            read(worker, layout, sent)
    other = all_sent(make_channel("nixl"), dtype)  # of a trainer that has none
    assert isinstance(worker.open(other.layouts[0], other.sent[0]), np.ndarray)


def test_a_part_larger_than_the_room_takes_a_larger_one_when_that_is_gone(monkeypatch):
    all_, worker = all_sent(make_channel("nixl")), incoming()
    small = weakref.ref(worker._room_for(64, False))
    alive = []

    def memory(nbytes):
        alive.append(small())
        return parts.host_memory(nbytes)

    monkeypatch.setattr(nixl, "host_memory", memory)
    read(worker, all_.layouts[0], all_.sent[0])
    assert alive == [None] and worker.room.nbytes == all_.layouts[0].nbytes
    room = worker.room
    assert worker._room_for(64, False) is room


def test_no_read_begins_before_the_stream_has_ended(monkeypatch):
    """Of a new room too: it was memory of what the stream still does."""
    order = []
    monkeypatch.setattr(nixl, "host_memory", lambda n: torch.zeros(n, dtype=torch.uint8))
    all_ = all_sent(make_channel("nixl"))

    class Port:
        def wait(self):
            order.append("wait")

    def room(nbytes):
        order.append("room")
        return parts.host_memory(nbytes)

    begin = nixl.Agent.read
    monkeypatch.setattr(nixl, "port_of", lambda device: Port())
    monkeypatch.setattr(nixl, "host_memory", room)
    monkeypatch.setattr(
        nixl.Agent, "read", lambda self, *told: order.append("read") or begin(self, *told)
    )
    worker = incoming()
    for layout, sent in zip(all_.layouts, all_.sent, strict=True):
        read(worker, layout, sent)
    grown = all_.layouts[1].nbytes > all_.layouts[0].nbytes
    assert order == ["room", "wait", "read", *(["room"] if grown else []), "wait", "read"]


def test_a_worker_that_needs_nothing_of_a_part_asks_for_nothing():
    """A trainer rank with experts that this worker does not serve."""
    all_, worker = all_sent(make_channel("nixl")), incoming(rank=7)
    for layout, sent in zip(all_.layouts, all_.sent, strict=True):
        assert layout.runs(7) == []
        assert worker.open(layout, sent).nbytes == layout.nbytes
    assert worker.peers == {}


@pytest.mark.parametrize("path", ["", "[1", "3", "{}", '{"agent": "x"}'])
def test_what_tells_of_no_memory_is_refused(path):
    all_ = all_sent(make_channel("nixl"))
    sent = dataclasses.replace(all_.sent[0], path=path)
    with pytest.raises(RefitError, match="rank 0 did not tell where its part is"):
        incoming().open(all_.layouts[0], sent)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "FILE"},
        {"kind": 3},
        {"kind": ["DRAM"]},
        {"agent": None},
        {"metadata": 7},
        {"address": -1},
        {"address": 1.5},
        {"address": "7"},
        {"address": 2**64},
        {"device": -1},
        {"device": True},
    ],
    ids=str,
)
def test_so_is_what_is_told_of_another_kind(change):
    all_ = all_sent(make_channel("nixl"))
    told = json.loads(all_.sent[0].path) | change
    sent = dataclasses.replace(all_.sent[0], path=json.dumps(told))
    with pytest.raises(RefitError, match="rank 0 did not tell where its part is"):
        incoming().open(all_.layouts[0], sent)


@pytest.mark.parametrize(
    "change",
    [{"metadata": "AAAA"}, {"metadata": "?"}, {"address": 4096}, {"device": 99}, {"kind": "VRAM"}],
)
def test_memory_that_is_not_the_senders_is_not_read(change):
    all_, worker = all_sent(make_channel("nixl")), incoming()
    layout, sent = all_.layouts[0], all_.sent[0]
    told = json.loads(sent.path) | change
    with pytest.raises(RefitError, match="trainer rank 0 did not send its part"):
        worker.open(layout, dataclasses.replace(sent, path=json.dumps(told)))
    read(worker, layout, sent)


def test_ends_that_are_dropped_leave_no_thread_and_no_descriptor():
    def drop():
        all_, worker = all_sent(make_channel("nixl")), incoming()
        read(worker, all_.layouts[0], all_.sent[0])

    drop()
    gc.collect()
    process = psutil.Process()
    before = process.num_threads(), process.num_fds()
    for _ in range(3):
        drop()
    gc.collect()
    assert (process.num_threads(), process.num_fds()) == before


def test_segments_that_others_cannot_read_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(RefitError, match="nixl: PYTORCH_ALLOC_CONF has .* or use distributed"):
        make_channel("nixl").outgoing(None, "127.0.0.1").memory(64, torch.device("cuda"))


def test_it_is_refused_before_anything_starts(monkeypatch):
    transports.check(RefitConfig(transport="nixl"))
    merged = RefitConfig(transport="nixl", mode="merged")
    for refuse in (transports.check, lambda settings: transports.choose(settings, ["a"], ["b"])):
        with pytest.raises(
            ConfigError, match="nixl has room for one part .* use refit.transport=auto"
        ):
            refuse(merged)
    monkeypatch.setattr(transports, "importable", lambda name: name != "nixl_cu13")
    with pytest.raises(ConfigError, match="nixl needs nixl_cu13, .* pip install nixl-cu13"):
        transports.check(RefitConfig(transport="nixl"))
    for other in transports.transport_names():
        if other not in ("nixl", "directory"):
            transports.check(RefitConfig(transport=other))


HANGS_UP = """
import os, signal, time
from lora_moe_rl.refit.transports.nixl import Agent
signal.signal(signal.SIGHUP, signal.SIG_DFL)
agent = Agent()
os.kill(os.getpid(), signal.SIGHUP)
time.sleep(5)
"""


def test_a_process_with_an_agent_still_ends_when_it_is_hung_up():
    done = subprocess.run([sys.executable, "-c", HANGS_UP], capture_output=True)
    assert done.returncode == -signal.SIGHUP, done.stderr
