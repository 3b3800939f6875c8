"""Copies that are begun and waited for once, as to a GPU: here they are done when they are waited
for, and not before. On a GPU it is tests/gpu/test_channels.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refit_workers import Worker

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit import receiver
from lora_moe_rl.refit.copies import Cuda, Host, Sources, port_of

pytestmark = pytest.mark.seconds  # imports vLLM


class Later:
    """`said`: what was asked, in its order."""

    def __init__(self):
        self.said: list[str] = []
        self.begun: list = []

    def lock(self, memory: np.ndarray) -> None:
        self.said.append("lock")

    def unlock(self, memory: np.ndarray) -> None:
        self.said.append("unlock")

    def writer(self, held: torch.Tensor, shape: tuple[int, ...]):
        write = Host().writer(held, shape)

        def begin(data: np.ndarray) -> None:
            self.said.append("write")
            self.begun.append((write, data))

        return begin

    def wait(self) -> None:
        self.said.append("wait")
        for write, data in self.begun:
            write(data)
        self.begun.clear()

    def heard(self) -> str:
        """All that was said since, each run of one word as one."""
        said, self.said = self.said, []
        return " ".join(word for i, word in enumerate(said) if said[i - 1 : i] != [word])


@pytest.fixture
def port(monkeypatch) -> Later:
    port = Later()
    monkeypatch.setattr(receiver, "port_of", lambda device: port)
    return port


def test_a_version_is_served_when_its_copies_are_done(port):
    worker = Worker()
    for version in (1, 2):
        slot = worker.publish(version)
        assert worker.holds(slot, version) and not port.begun
        worker.receiver.refit_drop(version)


def test_memory_that_stays_is_locked_once_and_until_another_takes_its_place(port):
    worker = Worker()
    texts = []
    for version in (1, 2, 3):  # one sender: its memory stays
        texts.append(worker.send_again(version))
        assert "error" not in worker.receiver.refit_stage(version, texts[-1])
        texts[-1] = port.heard()
    assert texts == ["write wait", "lock write wait", "write wait"]
    worker.receiver.refit_stage(4, worker.send(4))  # another sender
    assert port.heard() == "wait unlock write wait"


def test_memory_that_is_new_each_time_is_not_locked_and_goes_after_its_copies(port):
    sources = Sources(port)
    for _ in range(3):
        assert not sources.locked(0, np.zeros(4, np.uint8))
    assert port.heard() == ""
    kept = np.zeros(4, np.uint8)
    assert [sources.locked(1, kept) for _ in range(3)] == [False, True, True]
    assert not sources.locked(2, kept.copy())
    assert port.heard() == "lock"


def test_what_is_refused_in_the_middle_leaves_no_copy_behind(port):
    worker = Worker()
    text = worker.send(1)
    worker.senders[1].buffer[worker.layouts[0].entries[3].offset + 1] ^= 1
    assert "the checksum of" in worker.receiver.refit_stage(1, text)["error"]
    assert port.heard() == "write wait" and not port.begun


def test_memory_that_the_driver_does_not_lock_is_an_error(monkeypatch):
    asked = []

    def answer(code: int):
        return lambda *arguments: asked.append(arguments) or code

    driver = SimpleNamespace(cudaHostRegister=answer(0), cudaHostUnregister=answer(0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = np.zeros(4096, np.uint8)
    Cuda().lock(memory)
    Cuda().unlock(memory)
    address = memory.ctypes.data
    assert asked == [(address, 4096, 0), (address,)]
    driver.cudaHostRegister = driver.cudaHostUnregister = answer(801)
    with pytest.raises(RefitError, match="4,096 bytes .* cannot be page-locked .* 801.*ulimit -l"):
        Cuda().lock(memory)
    with pytest.raises(RefitError, match="cudaHostUnregister: error 801"):
        Cuda().unlock(memory)


def test_which_copies_a_slot_takes():
    assert isinstance(port_of(torch.device("cpu")), Host)
    assert isinstance(port_of(torch.device("cuda:0")), Cuda)
