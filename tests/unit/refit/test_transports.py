"""Transports, from a sender to what an engine worker reads: equal bytes, and faults that are
named."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from mapped_files import Files
from transport_ranks import VERSION, all_sent, make, make_channel, offer_and_wait, offering, stop

from lora_moe_rl.base import ipc
from lora_moe_rl.config import RefitConfig, RunConfig
from lora_moe_rl.config.recipes import resolve
from lora_moe_rl.errors import ConfigError, RefitError
from lora_moe_rl.refit import parts, transports
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.refit.transports import (
    choose,
    cuda_ipc,
    distributed,
    from_json,
    place,
)
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY

KINDS = ["shm", "directory", "distributed", "cuda_ipc", "nixl"]


@pytest.fixture(autouse=True)
def memory_of_gpus(tmp_path, monkeypatch):
    """Without a GPU, files that are mapped."""
    (tmp_path / "gpu").mkdir()
    monkeypatch.setattr(cuda_ipc.Channel, "port", Files(tmp_path / "gpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_worker_gets_its_boxes_bit_for_bit(kind, dtype, tmp_path):
    boxes_arrive(make(kind, tmp_path), dtype)


def boxes_arrive(channel, dtype):
    all_ = all_sent(channel, dtype)
    for rank in (0, 1):
        end = channel.incoming(rank)
        for layout, sender, sent in zip(all_.layouts, all_.senders, all_.sent, strict=True):
            buffer = end.open(layout, sent)
            mine = [i for i, e in enumerate(layout.entries) if rank in e.targets]
            assert 0 < len(mine) < len(layout.entries)
            parts.check_received(layout, sent, buffer, mine)
            for entry in (layout.entries[i] for i in mine):
                place = slice(entry.offset, entry.offset + entry.nbytes(dtype))
                np.testing.assert_array_equal(buffer[place], sender.buffer[place])


@pytest.mark.parametrize("kind", ["shm", "distributed", "cuda_ipc", "nixl"])
def test_a_byte_that_changes_on_the_way_is_named(kind, tmp_path):
    channel = make(kind, tmp_path)
    all_ = all_sent(channel)
    layout, entry = all_.layouts[1], all_.layouts[1].entries[5]
    all_.senders[1].buffer[entry.offset + 2] ^= 1
    rank = entry.targets[0]
    buffer = channel.incoming(rank).open(layout, all_.sent[1])
    mine = [i for i, e in enumerate(layout.entries) if rank in e.targets]
    with pytest.raises(RefitError, match=f"checksum of {entry.tensor} from trainer rank 1"):
        parts.check_received(layout, all_.sent[1], buffer, mine)


def test_a_pair_of_ranks_has_one_message():
    for layout in all_sent(SHARED_MEMORY).layouts:
        for rank in (0, 1):
            ((start, stop),) = layout.runs(rank)
            mine = [e for e in layout.entries if rank in e.targets]
            assert start == mine[0].offset and stop - start < layout.nbytes
            assert stop - start < sum(e.nbytes("float32") for e in mine) + 64 * len(mine)


# ---- shm


def test_memory_under_the_path_of_a_process_that_has_ended_is_mapped_anew():
    """A rank that comes back may have the number of the one before it."""
    first, again = all_sent(SHARED_MEMORY), all_sent(SHARED_MEMORY)
    end, layout, sent = SHARED_MEMORY.incoming(0), first.layouts[0], first.sent[0]
    memory = end.open(layout, sent)
    assert end.open(layout, sent) is memory
    again.senders[0].buffer[7] ^= 1
    os.dup2(*(int(Path(all_.sent[0].path).name) for all_ in (again, first)))
    assert end.open(layout, sent)[7] == memory[7] ^ 1


# ---- distributed


@pytest.fixture
def trainer_process():
    with offering(offer_and_wait) as one:
        yield SimpleNamespace(process=one.process, layout=one.layouts[1], sent=one.sent[1])


def test_another_process_sends_as_often_as_asked_until_it_is_gone(trainer_process):
    layout, sent = trainer_process.layout, trainer_process.sent
    workers = [distributed.Incoming(rank, timeout_s=20) for rank in (0, 1, 0)]
    for worker in [*workers, *workers]:
        buffer = worker.open(layout, sent)
        mine = [i for i, e in enumerate(layout.entries) if worker.rank in e.targets]
        parts.check_received(layout, sent, buffer, mine)

    stale = dataclasses.replace(sent, version=13)
    with pytest.raises(RefitError, match="asked for adapter version 13, it has version 12"):
        workers[0].open(layout, stale)
    workers[0].open(layout, sent)

    os.kill(trainer_process.process.pid, signal.SIGKILL)
    trainer_process.process.join()
    started = time.monotonic()
    for worker in (workers[0], distributed.Incoming(0, timeout_s=20)):
        with pytest.raises(RefitError, match="trainer rank 1 at 127.0.0.1:.* did not send"):
            worker.open(layout, sent)
    assert time.monotonic() - started < 10  # it is seen, not waited for


def test_a_trainer_rank_that_hangs_is_given_up(trainer_process):
    stop(trainer_process.process)
    with pytest.raises(RefitError, match="took longer than refit.timeout_s=1 "):
        distributed.Incoming(0, timeout_s=1).open(trainer_process.layout, trainer_process.sent)


def test_so_is_one_that_hangs_when_it_was_asked_before(trainer_process):
    """Its store's time-outs are its own, and it does not tell of them."""
    worker = distributed.Incoming(0, timeout_s=3)
    worker.open(trainer_process.layout, trainer_process.sent)
    stop(trainer_process.process)
    with pytest.raises(RefitError, match="took longer than refit.timeout_s=3 "):
        worker.open(trainer_process.layout, trainer_process.sent)


@pytest.mark.parametrize("timeout_s", [1, 600], ids=["leaves", "hangs"])
def test_a_worker_that_leaves_or_hangs_does_not_stop_the_others(timeout_s):
    all_ = all_sent(make_channel("distributed", timeout_s=timeout_s))
    layout, sent = all_.layouts[0], all_.sent[0]
    leaver = distributed.Incoming(0, timeout_s=1)
    leaver.open(layout, sent)
    link = leaver.links[sent.path]
    ask = {"ask": "x", "link": "nobody", "rank": 0, "version": VERSION}
    link.store.queue_push(link.secret, json.dumps(ask))  # and then never meets the sender
    leaver.links.clear()
    buffer = distributed.Incoming(1, timeout_s=20).open(layout, sent)
    mine = [i for i, e in enumerate(layout.entries) if 1 in e.targets]
    parts.check_received(layout, sent, buffer, mine)


def offered(all_, version: int) -> SentPart:
    """Of the first trainer rank."""
    return all_.senders[0].send(version)


def test_links_of_workers_that_are_gone_end_with_all_that_they_hold():
    all_ = all_sent(make_channel("distributed"))
    layout, end = all_.layouts[0], all_.senders[0].outgoing
    stays = distributed.Incoming(1, timeout_s=20)
    process = psutil.Process()
    for version in range(VERSION, VERSION + 8):
        sent = offered(all_, version)
        stays.open(layout, sent)
        distributed.Incoming(0, timeout_s=20).open(layout, sent)  # and is gone
        assert len(end.links) <= 1 + distributed.UNASKED and end.asked.keys() == end.links.keys()
        if version == VERSION + 3:
            held = process.num_fds(), process.num_threads()
    deadline = time.monotonic() + 10
    while (process.num_fds(), process.num_threads()) > held and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.num_fds() <= held[0] and process.num_threads() <= held[1]


def test_a_worker_that_has_not_asked_for_long_comes_back_to_its_link():
    all_ = all_sent(make_channel("distributed"))
    layout, end = all_.layouts[0], all_.senders[0].outgoing
    waits, other = (distributed.Incoming(rank, timeout_s=5) for rank in (0, 1))
    waits.open(layout, all_.sent[0])
    link = waits.links[all_.sent[0].path]
    for version in range(VERSION + 1, VERSION + 4):
        other.open(layout, sent := offered(all_, version))
    assert link.name not in end.links
    parts.check_received(
        layout,
        sent,
        waits.open(layout, sent),
        [i for i, entry in enumerate(layout.entries) if 0 in entry.targets],
    )
    assert waits.links[sent.path] is link and link.name in end.links


STRAY = [b"\xff\x00", b"{}", b"[1]", b"[" * 100_000, b'{"ask": 1}', json.dumps(
    {"ask": "a", "link": ["b"], "rank": 0, "version": 1}).encode()]  # fmt: skip


def test_stray_messages_do_not_end_the_service():
    all_ = all_sent(make_channel("distributed"))
    layout, sent = all_.layouts[0], all_.sent[0]
    place, _, secret = sent.path.rpartition("/")
    store = distributed._connect("127.0.0.1", int(place.rpartition(":")[2]), 20)
    for message in STRAY:
        store.queue_push(secret, message)
    buffer = distributed.Incoming(0, timeout_s=20).open(layout, sent)
    mine = [i for i, e in enumerate(layout.entries) if 0 in e.targets]
    parts.check_received(layout, sent, buffer, mine)


def test_a_peer_without_the_secret_gets_nothing():
    """It reaches the store, and may read all keys there."""
    all_ = all_sent(make_channel("distributed"))
    layout, sent = all_.layouts[0], all_.sent[0]
    place, _, secret = sent.path.rpartition("/")
    distributed.Incoming(0, timeout_s=20).open(layout, sent)  # one that has it
    guess = dataclasses.replace(sent, path=f"{place}/asked")
    with pytest.raises(RefitError, match=f"trainer rank 0 at {place} did not send") as caught:
        distributed.Incoming(1, timeout_s=1).open(layout, guess)
    assert secret not in str(caught.value)
    store = distributed._connect("127.0.0.1", int(place.rpartition(":")[2]), 20)
    assert not any(secret in key for key in store.list_keys())


def test_the_store_listens_on_one_address():
    all_ = all_sent(make_channel("distributed"))
    ports = {int(sent.path.rpartition("/")[0].rpartition(":")[2]) for sent in all_.sent}
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    }
    assert listening == {"127.0.0.1"}


# ---- CUDA IPC


def test_memory_is_mapped_once_and_anew_from_a_rank_that_came_back(tmp_path):
    channel = make("cuda_ipc", tmp_path)
    end, first, again = channel.incoming(0), all_sent(channel), all_sent(channel)
    layout = first.layouts[0]
    memory = end.open(layout, first.sent[0])
    assert end.open(layout, dataclasses.replace(first.sent[0], version=13)) is memory
    first.senders[0].buffer[7] ^= 1
    assert memory[7] == first.senders[0].buffer[7]  # the same memory, and not a copy
    other = end.open(layout, again.sent[0])
    assert other is not memory and other[7] == memory[7] ^ 1
    assert list(end.mapped) == [0]


def told(sent, **changes):
    return dataclasses.replace(sent, path=json.dumps(json.loads(sent.path) | changes))


def test_memory_that_is_not_what_was_agreed_on_is_refused(tmp_path):
    channel = make("cuda_ipc", tmp_path)
    all_ = all_sent(channel)
    layout, sent = all_.layouts[1], all_.sent[1]
    end = channel.incoming(0)
    with pytest.raises(RefitError, match=rf"rank 1: {sent.nbytes - 64} bytes instead of"):
        end.open(layout, told(sent, nbytes=sent.nbytes - 64))
    for path in ("", "[1", "3", "{}"):
        with pytest.raises(RefitError, match="version 12 of trainer rank 1 on its GPU cannot be"):
            end.open(layout, dataclasses.replace(sent, path=path))
    end.open(layout, sent)


def test_memory_that_cannot_be_shared_leaves_another_way_out(monkeypatch):
    monkeypatch.setattr(cuda_ipc.Channel, "port", ipc.Cuda())
    channel = make_channel("cuda_ipc")
    with pytest.raises(RefitError, match="cuda_ipc: this process has no GPU; or use shm"):
        channel.outgoing(None, "127.0.0.1").memory(64, torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(RefitError, match="PYTORCH_ALLOC_CONF has expandable_segments:True, .* shm"):
        channel.outgoing(None, "127.0.0.1").memory(64, torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    handles = dict.fromkeys(ipc.HANDLES, "AAE=") | dict.fromkeys(ipc.SIZES, 0) | {"sync": True}
    sent = SentPart(0, 12, json.dumps(handles), 64, (1,))
    with pytest.raises(RefitError, match="version 12 of trainer rank 0 .* this process has no GPU"):
        channel.incoming(0).open(None, sent)


# ---- which


def test_auto_is_shared_memory_where_all_run_in_one_place():
    here = place()
    for transport, engine, chosen in [
        ("auto", here, "shm"),
        ("auto", "elsewhere", "distributed"),
        ("distributed", here, "distributed"),
    ]:
        channel = choose(RefitConfig(transport=transport), [here, here], [engine])
        assert channel.settings.transport == chosen
        assert type(channel).__module__.endswith(f".{chosen}")
    for transport in ("shm", "cuda_ipc"):
        assert choose(RefitConfig(transport=transport), [here], [here]).settings
        with pytest.raises(ConfigError, match=f"{transport} needs .* use distributed or directory"):
            choose(RefitConfig(transport=transport), [here], ["elsewhere"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "directory"}, "needs refit.directory"),
        ({"transport": "directory", "directory": "refit"}, "refit.directory=refit is relative"),
    ],
)
def test_a_directory_must_be_given_from_the_root(settings, message):
    with pytest.raises(ValueError, match=message):
        RefitConfig(**settings)


# ---- adding one


def test_a_transport_is_added_by_one_file(tmp_path, monkeypatch):
    """The one of the page that tells how."""
    page = Path(__file__).parents[3] / "docs" / "adding" / "transport.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "copies.py").write_text(code)
    monkeypatch.setattr(transports, "__path__", [*transports.__path__, str(tmp_path)])
    ours = ("cuda_ipc", "directory", "distributed", "nixl", "shm")
    assert transports.transport_names() == ("copies", *ours)
    resolve(RunConfig(refit=RefitConfig(transport="copies")))  # as a run is asked for it
    channel = from_json(make_channel("copies").to_json())
    boxes_arrive(channel, "float32")
    all_ = all_sent(channel)
    with pytest.raises(RefitError, match="cannot read an adapter from"):
        gone = dataclasses.replace(all_.sent[0], path=f"{all_.sent[0].path}-gone")
        channel.incoming(0).open(all_.layouts[0], gone)
    assert channel.unfit(["here", "there"])


def test_the_names_of_transports_are_had_without_torch():
    code = (
        "import sys; from lora_moe_rl.refit.transports import transport_names;"
        "assert transport_names() == ('cuda_ipc', 'directory', 'distributed', 'nixl', 'shm');"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
