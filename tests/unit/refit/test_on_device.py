"""Parts that are packed and checked on a device. Here the CPU is one, by the same code."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from mapped_files import Files
from published_configs import QWEN3_30B_A3B, shrunk
from refit_ranks import make_layouts, make_senders
from transport_ranks import all_sent, make_channel

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit import on_device, parts
from lora_moe_rl.refit.copies import Host
from lora_moe_rl.refit.transports import cuda_ipc
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY

CONFIG = shrunk(QWEN3_30B_A3B) | {"num_hidden_layers": 2}
NAME = "layers.1.experts.down.B"


@pytest.fixture(autouse=True)
def mapped(tmp_path, monkeypatch):
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(cuda_ipc.Channel, "port", Files(tmp_path / "memory"))


def one_sender(values=None, dtype="float32", channel="cuda_ipc"):
    shape = ModelShape.from_hf_config(CONFIG)
    spec = AdapterSpec.build(shape, AdapterConfig(rank=3, alpha=4))
    tensors = {
        name: np.random.default_rng(i).standard_normal(shape, dtype=np.float32)
        for i, (name, shape) in enumerate(spec.tensor_shapes.items())
    }
    layouts = make_layouts(spec, dtype=dtype)
    values = tensors | (values or {})
    (sender,) = make_senders(layouts, spec, values, TrainerConfig(), make_channel(channel))
    return sender, tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lies_on_a_device_is_what_would_lie_on_the_host(dtype):
    there, here = all_sent(make_channel("cuda_ipc"), dtype), all_sent(SHARED_MEMORY, dtype)
    for one, other in zip(there.senders, here.senders, strict=True):
        assert isinstance(one.buffer, torch.Tensor)
        np.testing.assert_array_equal(one.buffer.numpy(), other.buffer)


def test_a_checksum_sees_every_bit_of_every_word_and_boxes_that_change_places(monkeypatch):
    monkeypatch.setattr("lora_moe_rl.kernels.bit_sums.WORDS", 4)  # several parts
    box = torch.randn(3, 7).bfloat16()
    before = on_device.checksums([box])
    bits = box.view(-1).view(torch.int16)
    for i in range(len(bits)):
        for bit in range(16):
            mask = -(2**15) if bit == 15 else 2**bit
            bits[i] ^= mask
            assert on_device.checksums([box]) != before
            bits[i] ^= mask
    assert on_device.checksums([box]) == before != on_device.checksums([box.flip(0)])
    one, other = torch.zeros(4), torch.ones(4)
    sums = on_device.checksums([one, other, one])
    assert sums[0] == sums[2] != sums[1] and all(0 <= each < 2**64 for each in sums)
    assert on_device.checksums([]) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("run_bytes", [2**26, 1])  # all boxes together, and each by itself
def test_values_that_are_not_finite_are_not_sent(value, dtype, run_bytes, monkeypatch):
    monkeypatch.setattr("lora_moe_rl.refit.sender.DEVICE_RUN_BYTES", run_bytes)
    _, tensors = one_sender()
    tensors[NAME][2, 5, 1] = value
    sender, _ = one_sender(tensors, dtype)
    with pytest.raises(RefitError, match=rf"version 7: {NAME} holds .* at \[2, 5, 1\]"):
        sender.send(7)


def test_the_device_is_asked_twice_for_a_version(monkeypatch):
    """Whatever the number of boxes: for the sums, and whether all is finite."""
    sender, _ = one_sender()
    asked = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(1) or tolist(self))
    for name in ("item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda self: pytest.fail("waits for the device"))
    sender.send(3)
    assert len(asked) == 2


def test_memory_that_held_something_else_is_of_no_consequence(tmp_path, monkeypatch):
    class Used(Files):
        def empty(self, nbytes):
            return super().empty(nbytes).fill_(0xFF)  # NaN

    monkeypatch.setattr(cuda_ipc.Channel, "port", Used(tmp_path / "memory"))
    for dtype in ("float32", "bfloat16"):
        sender, _ = one_sender(dtype=dtype)
        assert any(entry.nbytes(dtype) % parts.ALIGNMENT for entry in sender.layout.entries)
        sender.send(1)


def test_a_sender_sends_what_its_tensors_hold_now():
    sender, _ = one_sender()
    first = sender.send(1)
    sender.runs[0].blocks[0].pieces[0][1].add_(1)
    second = sender.send(2)
    changed = [a != b for a, b in zip(first.checksums, second.checksums, strict=True)]
    assert changed == [True] + [False] * (len(changed) - 1)
    assert second.path == first.path  # the memory stays
    parts.check_received(sender.layout, second, sender.buffer, range(len(changed)))
    with pytest.raises(RefitError, match="checksum of layers.0"):
        parts.check_received(sender.layout, first, sender.buffer, range(len(changed)))


# ---- adapters on a GPU, a part on the host


class Apart(Host):
    """A device whose copies are there when they are waited for: of what it held when they were
    begun."""

    apart = True

    def __init__(self):
        self.locked: list[np.ndarray] = []

    def lock(self, memory: np.ndarray) -> None:
        self.locked.append(memory)

    def unlock(self, memory: np.ndarray) -> None:
        self.locked = [one for one in self.locked if one is not memory]

    def fetch(self, to: np.ndarray, values: torch.Tensor):
        to[:] = 0xFF  # NaN, until it is waited for
        held = values.numpy().copy()
        return lambda: np.copyto(to, held)


@pytest.fixture
def apart(monkeypatch) -> Apart:
    port = Apart()
    monkeypatch.setattr("lora_moe_rl.refit.sender.port_of", lambda device: port)
    return port


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("run_bytes", [2**26, 4096, 1])
def test_what_comes_through_a_device_is_what_would_be_packed_here(
    apart, dtype, run_bytes, monkeypatch
):
    monkeypatch.setattr("lora_moe_rl.refit.sender.DEVICE_RUN_BYTES", run_bytes)
    there = all_sent(SHARED_MEMORY, dtype)
    monkeypatch.undo()
    here = all_sent(SHARED_MEMORY, dtype)
    for one, other in zip(there.senders, here.senders, strict=True):
        assert one.staged and not other.staged and (len(one.runs) > 1) == (run_bytes < 2**20)
        for entry in one.layout.entries:
            span = entry.span(dtype)
            np.testing.assert_array_equal(one.buffer[span], other.buffer[span])
    sums = [[sent.checksums for sent in all_.sent] for all_ in (there, here)]
    assert sums[0] == sums[1]


def test_host_memory_is_locked_as_long_as_its_sender_lives(apart):
    all_ = all_sent(SHARED_MEMORY)
    assert [id(memory) for memory in apart.locked] == [id(one.buffer) for one in all_.senders]
    del all_
    gc.collect()
    assert not apart.locked


def test_values_that_are_not_finite_are_found_behind_a_device_too(apart, monkeypatch):
    monkeypatch.setattr("lora_moe_rl.refit.sender.DEVICE_RUN_BYTES", 4096)
    _, tensors = one_sender()
    tensors[NAME][2, 5, 1] = np.nan
    sender, _ = one_sender(tensors, channel="shm")
    with pytest.raises(RefitError, match=rf"version 7: {NAME} holds nan at \[2, 5, 1\]"):
        sender.send(7)
    pieces = (p for run in sender.runs for block in run.blocks for p in block.pieces)
    for _, tensor, _, _ in pieces:
        tensor.nan_to_num_()
    before = sender.send(8).checksums
    sender.runs[0].packed.fill_(0xFF)  # as a run of it would leave the room
    assert sender.send(9).checksums == before
