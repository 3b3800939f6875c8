"""What `bench refit` measures in the worker, on a device whose copies go on by themselves."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.seconds  # imports vLLM
worker = pytest.importorskip("lora_moe_rl.bench.refit_worker")


class Port:
    """Each copy takes a second of the device from when it is begun, one after the other."""

    def __init__(self, clock: list[float]):
        self.clock, self.busy_until, self.locked, self.calls = clock, 0.0, [], 0

    def lock(self, memory: np.ndarray) -> None:
        self.locked.append(memory.nbytes)

    def unlock(self, memory: np.ndarray) -> None:
        self.locked.append(-memory.nbytes)

    def begin(self, *_) -> None:
        self.busy_until = max(self.busy_until, self.clock[0]) + 1

    def wait(self) -> None:
        self.clock[0] = max(self.clock[0], self.busy_until)


@pytest.fixture
def clock(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(worker.time, "perf_counter", lambda: now[0])
    return now


def test_the_clock_stops_when_the_device_has_done_what_was_begun(clock):
    port = Port(clock)
    port.begin()  # of before
    assert worker.timed(lambda: [port.begin() for _ in range(3)], port) == 3


def test_writes_and_the_plain_copy_are_both_waited_for(clock, monkeypatch):
    port, buffer = Port(clock), np.arange(64, dtype=np.uint8)
    sent = worker.SentPart(0, 5, "", 64, (0,))
    places = [SimpleNamespace(span=slice(i, i + 16)) for i in range(0, 64, 16)]
    bench = object.__new__(worker.BenchReceiver)
    bench._refit_slots = SimpleNamespace(versions=lambda: {5: 1}, device=torch.device("cpu"))
    bench._refit_incoming = SimpleNamespace(open=lambda layout, part: buffer)
    bench._refit_layouts, bench._refit_places = {0: None}, {0: places}
    bench._refit_copies = port
    monkeypatch.setattr(bench, "_refit_writers", lambda *_: [port.begin] * 4, raising=False)
    right = torch.Tensor.copy_

    def copy(target, source, non_blocking=False):
        port.begin()
        return right(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    found = bench.bench_copies(json.dumps([asdict(sent)]), 2)
    assert found == {"write": [4, 4], "memcpy": [1, 1]}
    assert port.locked == [64, -64]
