"""`bench transports`: real processes, small parts; other bytes have no seconds to report."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from lora_moe_rl.bench import transports
from lora_moe_rl.errors import BenchmarkError


@pytest.mark.slow
def test_each_transport_brings_each_size(capsys):
    assert transports.main(["--mib", "1,2", "--rounds", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["mib"], row["transport"]) for row in rows] == [
        (mib, name) for mib in (1, 2) for name in transports.ROWS
    ]
    for row in rows:
        nbytes = row["mib"] * 2**20
        assert row["GB/s"] == pytest.approx(nbytes / row["seconds"] / 1e9)
        assert row["seconds"] > 0 and row["of a copy"] > 0


def test_what_is_not_installed_is_said_and_the_others_measured(monkeypatch, capsys):
    monkeypatch.setattr(transports.transports, "importable", lambda module: module != "nixl_cu13")
    assert transports.main(["--mib", "1", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "nixl over TCP: not measured, nixl_cu13 is not installed" in shown
    assert "distributed" in shown


def test_no_checksum_is_in_what_is_timed(monkeypatch):
    """A fetch takes 3 s, a copy 1, a checksum 100."""
    clock = [0.0]

    def taking(seconds, result=None):
        clock[0] += seconds
        return result

    class Incoming:
        def open(self, layout, sent):
            return taking(3, np.ones(layout.nbytes, np.uint8))

    incoming = SimpleNamespace(incoming=lambda rank: Incoming())
    monkeypatch.setattr(transports.transports, "from_json", lambda text: incoming)
    monkeypatch.setattr(transports.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(transports, "digest", lambda memory: taking(100, 7))
    monkeypatch.setattr(transports.np, "copyto", lambda *_: taking(1))
    told, answers = [object(), None], []
    pipe = SimpleNamespace(recv=lambda: told.pop(0), send=answers.append)
    transports.taking(pipe, "{}", SimpleNamespace(nbytes=8))
    assert answers == [(7, 4, 1)]


def stale(pipe, channel_json, layout):
    """A worker that keeps what it got first."""
    first = None
    while (sent := pipe.recv()) is not None:
        incoming = transports.transports.from_json(channel_json).incoming(0)
        first = np.array(incoming.open(layout, sent)) if first is None else first
        pipe.send((transports.digest(first), 1e-3, 1e-3))


def test_a_version_that_is_not_the_senders_has_no_seconds(monkeypatch):
    monkeypatch.setattr(transports, "taking", stale)
    with pytest.raises(BenchmarkError, match="shm: other bytes arrived"):
        transports.measured("shm", 1, 1)


def gone(pipe, channel_json, layout):
    pass


def test_a_process_that_ends_is_told(monkeypatch):
    monkeypatch.setattr(transports, "sending", gone)
    with pytest.raises(BenchmarkError, match="a process of the benchmark has ended"):
        transports.measured("shm", 1, 1)
