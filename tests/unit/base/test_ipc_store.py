"""A base in the memory of another process: what is mapped, refused, watched, and gone with it.
The memory is that of mapped files; on a GPU it is tests/gpu/test_held.py."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from mapped_files import CONTENTS, NAMES, WHOLE, Files, fill, own
from store_users import SERVER

from lora_moe_rl.base import ipc
from lora_moe_rl.base.contents import Kept
from lora_moe_rl.base.ipc_store import DESCRIPTION, WATCHED, checksum, map_store, share_store
from lora_moe_rl.errors import HeldBaseError, NotShared


@pytest.fixture
def port(tmp_path):
    (tmp_path / "memory").mkdir()
    return Files(tmp_path / "memory")


@pytest.fixture
def owned(port, tmp_path):
    store = share_store(tmp_path, CONTENTS, WHOLE, fill, port)
    yield store
    if store.tensors:
        store.close()


def test_what_an_engine_shares_a_trainer_maps(owned, port, tmp_path):
    mapped = map_store(tmp_path, CONTENTS, port)
    for name in NAMES:
        assert torch.equal(mapped[name], owned[name]) and mapped[name].dtype == torch.bfloat16
    owned["two"][1, 2] = 77.0  # the same memory, and not a copy
    assert mapped["two"][1, 2] == 77.0


def test_nothing_is_pickled(owned, tmp_path):
    told = json.loads((tmp_path / "GPU-1" / DESCRIPTION).read_text())
    assert set(told["memory"]) == set(NAMES) and told["key"] == {"model": "a"}


@pytest.mark.parametrize(
    ("other", "gpu", "message"),
    [
        (replace(CONTENTS, key={"model": "b"}), "GPU-1", "model is a there and b here"),
        (CONTENTS, "GPU-2", "GPU-2: no engine holds the base there, .* does: GPU-1"),
        (
            replace(CONTENTS, tensors=CONTENTS.tensors | {"two": Kept("bfloat16", (5, 3))}),
            "GPU-1",
            "two is .*3, 5.* there and .*5, 3",
        ),
    ],
)
def test_what_is_of_something_else_is_refused_by_name(owned, port, tmp_path, other, gpu, message):
    with pytest.raises(HeldBaseError, match=message):
        map_store(tmp_path, other, Files(port.directory, gpu))


def test_another_format_is_refused(owned, port, tmp_path):
    told = json.loads((tmp_path / "GPU-1" / DESCRIPTION).read_text())
    (tmp_path / "GPU-1" / DESCRIPTION).write_text(json.dumps(told | {"format": 2}))
    with pytest.raises(HeldBaseError, match="format is 2 there and 3 here"):
        map_store(tmp_path, CONTENTS, port)


@pytest.mark.parametrize("lost", ["key", "device", "parts", "memory", "sums", "generation"])
def test_a_damaged_description_is_refused(owned, port, tmp_path, lost):
    told = json.loads((tmp_path / "GPU-1" / DESCRIPTION).read_text())
    del told[lost]
    (tmp_path / "GPU-1" / DESCRIPTION).write_text(json.dumps(told))
    with pytest.raises(HeldBaseError, match="is damaged"):
        map_store(tmp_path, CONTENTS, port)
    (tmp_path / "GPU-1" / DESCRIPTION).write_text("[1")
    with pytest.raises(HeldBaseError, match="is damaged"):
        map_store(tmp_path, CONTENTS, port)


def test_memory_of_another_size_is_refused(owned, port, tmp_path):
    told = json.loads((tmp_path / "GPU-1" / DESCRIPTION).read_text())
    told["memory"]["two"]["nbytes"] -= 2
    (tmp_path / "GPU-1" / DESCRIPTION).write_text(json.dumps(told))
    with pytest.raises(HeldBaseError, match="28 bytes of memory for a tensor of 30"):
        map_store(tmp_path, CONTENTS, port)


def test_there_is_one_owner(owned, port, tmp_path):
    with pytest.raises(HeldBaseError, match="another engine holds the base on this GPU already"):
        share_store(tmp_path, CONTENTS, WHOLE, fill, port)
    map_store(tmp_path, CONTENTS, port).check()


def test_nothing_is_there_before_it_is_filled(port, tmp_path):
    def fail(name, out):
        raise HeldBaseError("no such tensor")

    for _ in range(2):
        with pytest.raises(HeldBaseError, match="no such tensor"):
            share_store(tmp_path, CONTENTS, WHOLE, fail, port)
        with pytest.raises(HeldBaseError, match="no engine holds the base there"):
            map_store(tmp_path, CONTENTS, port)


def test_an_owner_that_is_killed_is_seen_and_another_may_follow(port, tmp_path):
    ready = SERVER.Event()
    process = SERVER.Process(target=own, args=(tmp_path, port, ready))
    process.start()
    assert ready.wait(60)
    mapped = map_store(tmp_path, CONTENTS, port)
    mapped.check()
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    with pytest.raises(HeldBaseError, match="the engine that holds the base has ended"):
        mapped.check()
    with pytest.raises(HeldBaseError, match="no engine holds the base there"):
        map_store(tmp_path, CONTENTS, port)
    again = share_store(tmp_path, CONTENTS, WHOLE, fill, port)
    with pytest.raises(HeldBaseError, match="the engine that holds the base has ended"):
        mapped.check()  # an engine lives there, and it is another
    map_store(tmp_path, CONTENTS, port).check()
    again.close()


@pytest.mark.parametrize("name", NAMES)
def test_an_element_that_somebody_writes_is_found_within_a_round(owned, port, tmp_path, name):
    mapped = map_store(tmp_path, CONTENTS, port)
    for _ in range(4):
        mapped.check()
    mapped[name].view(torch.int16)[2, 4] ^= 1
    with pytest.raises(HeldBaseError, match=f"{name} is not what the engine has put there"):
        for _ in range(-(-len(NAMES) // WATCHED)):
            mapped.check()
    with pytest.raises(HeldBaseError, match=f"{name} is not what the engine has put there"):
        map_store(tmp_path, CONTENTS, port)


def test_a_checksum_sees_every_bit_and_two_values_that_change_places(monkeypatch):
    monkeypatch.setattr("lora_moe_rl.kernels.bit_sums.WORDS", 4)  # several parts
    values = torch.randn(9, 3)
    before = checksum(values)
    bits = values.flatten().view(torch.int32)
    for place in range(len(bits)):
        for bit in (1, 1 << 13, -(1 << 31)):
            bits[place] ^= bit
            assert checksum(values) != before
            bits[place] ^= bit
    assert checksum(values) == before
    assert checksum(values.flip(0)) != before


def test_memory_that_cannot_be_opened_says_what_can_be_set(owned, port, tmp_path, monkeypatch):
    def gone(told):
        raise NotShared("memory of another process cannot be opened")

    monkeypatch.setattr(port, "open", gone)
    with pytest.raises(HeldBaseError, match="cannot be opened; or set model.held_once=off"):
        map_store(tmp_path, CONTENTS, port)


@pytest.mark.parametrize("change", [{"handle": "%"}, {"event": None}, {"counter": 3}])
def test_a_handle_that_is_none_is_refused(change):
    told = {"handle": "AAE=", "counter": "AAE=", "event": ""}
    assert ipc.handles_of(told) == (b"\0\1", b"\0\1", b"")
    with pytest.raises(NotShared, match="a handle of memory on a GPU is damaged"):
        ipc.handles_of(told | change)
