"""A tracker whose server is slow, fails or hangs: no step waits for it, and nothing is silent."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lora_moe_rl.config import RunConfig, TrackerConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry import tracker_thread
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.tracker_thread import TrackerThread
from lora_moe_rl.telemetry.trackers.base import Tracker


class Server(Tracker):
    """`got`: what came, in order. While `open` is not set it takes nothing. `refuses` the adapters
    of these steps, and is `gone` from a step on."""

    def __init__(self, open_: bool = True, refuses: tuple[int, ...] = (), gone: int = 99):
        self.open, self.got = threading.Event(), []
        self.asked = threading.Event()  # by the first call
        self.refuses, self.gone = refuses, gone
        if open_:
            self.open.set()

    def _take(self, *what: object) -> None:
        self.asked.set()
        assert self.open.wait(30)
        self.got.append(what)

    def write(self, step, metrics):
        if step >= self.gone:
            raise OSError("the server is gone")
        self._take("metrics", step)

    def details(self, step, details):
        self._take("details", step)

    def adapter(self, step, directory):
        if step in self.refuses:
            raise OSError("413 too large")
        self._take("adapter", step, (directory / "adapter_model").read_text())

    def close(self, failed):
        self._take("failed" if failed else "done")


class Watched:
    """A thread of a server's, and what it said."""

    def __init__(self, folder: Path, server: Tracker):
        self.server: Any = server
        self.said: list[str] = []
        self.folder, self.directory = folder / "waiting", folder / "adapter"
        self.directory.mkdir()
        self.thread = TrackerThread(server, self.folder, self.said.append, Path("metrics.jsonl"))

    def adapter(self, step: int) -> None:
        """As a checkpoint leaves it: another file of the same name."""
        fresh = self.directory / "fresh"
        fresh.write_text(f"of step {step}")
        fresh.replace(self.directory / "adapter_model")
        self.thread.adapter(step, self.directory)

    def ended(self, seconds: float = 30, failed: bool = False) -> None:
        self.thread.close(failed)
        self.thread.wait(time.monotonic() + seconds)


@pytest.fixture
def watched(tmp_path):
    def make(**server) -> Watched:
        return Watched(tmp_path, Server(**server))

    return make


def test_no_call_waits_for_a_server_that_takes_nothing_and_it_gets_all_of_them_in_order(watched):
    run = watched(open_=False)
    for step in (1, 2):
        run.thread.write(step, {})
        run.thread.details(step, Details())
    run.adapter(2)
    run.thread.write(3, {})
    assert run.server.got == []  # and yet all of these have returned
    run.server.open.set()
    run.ended()
    assert run.server.got == [
        *(("metrics", 1), ("details", 1), ("metrics", 2), ("details", 2)),
        *(("adapter", 2, "of step 2"), ("metrics", 3), ("done",)),
    ]
    assert run.said == [] and not run.folder.exists()


def test_an_adapter_is_sent_as_it_was_though_the_next_one_has_taken_its_place(watched):
    run = watched(open_=False)
    run.adapter(2)
    assert run.server.asked.wait(30)  # it is being sent
    run.adapter(4)
    (run.directory / "adapter_model").unlink()
    run.server.open.set()
    run.ended(failed=True)
    assert run.server.got == [
        ("adapter", 2, "of step 2"),
        ("adapter", 4, "of step 4"),
        ("failed",),
    ]


def test_of_adapters_that_wait_the_newest_is_sent_and_the_others_are_counted(watched):
    run = watched(open_=False)
    run.thread.write(1, {})
    assert run.server.asked.wait(30)
    for step in (2, 4, 6):
        run.adapter(step)
    run.server.open.set()
    run.ended()
    assert run.server.got == [("metrics", 1), ("adapter", 6, "of step 6"), ("done",)]
    assert [line.partition(". The run goes on")[0] for line in run.said] == [
        "the adapter of step 2 was not sent to the tracker Server: that of step 4 was there before "
        "its turn came",
        "the adapter of step 4 was not sent to the tracker Server: that of step 6 was there before "
        "its turn came",
        "2 of 3 adapters were not sent to the tracker Server",
    ]


def test_an_adapter_comes_while_the_last_ones_turn_has_just_come(watched, monkeypatch):
    """Between the two nothing is under way, and nothing waits."""
    run, own = watched(), None
    armed, popped, on = threading.Event(), threading.Event(), threading.Event()

    def slow():
        call = own()
        if armed.is_set():
            popped.set()
            on.wait(30)
        return call

    own = run.thread._next
    monkeypatch.setattr(run.thread, "_next", slow)
    run.thread.write(1, {})  # ends the call of `_next` that is under way
    assert run.server.asked.wait(30)
    armed.set()
    run.adapter(2)
    assert popped.wait(30)
    run.adapter(4)
    on.set()
    run.ended()
    sent = [("adapter", step, f"of step {step}") for step in (2, 4)]
    assert run.server.got == [("metrics", 1), *sent, ("done",)]


def test_an_adapter_that_cannot_be_sent_is_counted_and_costs_nothing_else(watched):
    run = watched(refuses=(2,))
    run.adapter(2)
    run.thread.write(3, {})
    run.ended()
    assert run.server.got == [("metrics", 3), ("done",)]
    assert run.said == [
        "the adapter of step 2 was not sent to the tracker Server: 413 too large. The run goes on, "
        "and the next one is tried (1 of 1 so far were not sent)",
        "1 of 1 adapters were not sent to the tracker Server",
    ]


def test_a_server_that_is_gone_is_left_out_with_a_word_and_closed(watched):
    run = watched(gone=2)
    for step in (1, 2, 3):
        run.thread.write(step, {})
    run.ended()
    assert run.server.got == [("metrics", 1), ("done",)]
    assert run.said == [
        "the tracker Server failed and is left out from now on: the server is gone. metrics.jsonl "
        "has all metrics"
    ]


def test_one_that_cannot_be_closed_either_is_not_said_twice(watched, monkeypatch, caplog):
    def fails(*_: object) -> None:
        raise OSError("it is still gone")

    caplog.set_level(logging.INFO)
    run = watched(gone=1)
    monkeypatch.setattr(run.server, "close", fails)
    run.thread.write(1, {})
    run.ended()
    assert len(run.said) == 1 and "it is still gone" in caplog.text


@pytest.mark.parametrize(
    ("error", "why"), [(OSError("no room"), "no room"), (KeyError(), "KeyErr")]
)
def test_where_a_tracker_failed_is_in_the_log_and_the_console_has_one_line(
    watched, monkeypatch, caplog, error, why
):
    def fails(*_: object) -> None:
        raise error

    caplog.set_level(logging.INFO)
    run = watched()
    monkeypatch.setattr(run.server, "write", fails)
    monkeypatch.setattr(run.server, "adapter", fails)
    run.adapter(1)
    run.thread.write(2, {})
    run.ended()
    assert "to the tracker Server: " + why in run.said[0]
    assert "left out from now on: " + why in run.said[1] and len(run.said) == 3
    assert caplog.text.count("Traceback") == 2
    assert {record.levelno for record in caplog.records} == {logging.INFO}  # not the console's


def test_a_tracker_that_never_catches_up_is_left_out_before_it_fills_the_memory(
    watched, monkeypatch
):
    monkeypatch.setattr(tracker_thread, "MOST_CALLS", 5)
    run = watched(open_=False)
    run.thread.write(0, {})
    assert run.server.asked.wait(30)
    for step in range(1, 9):
        run.thread.write(step, {})
    run.server.open.set()
    run.ended()
    assert run.server.got == [("metrics", 0), ("done",)]
    (said,) = run.said
    assert said.startswith("the tracker Server failed and is left out from now on: it is 5 calls")


def test_the_end_of_a_run_waits_so_long_and_says_what_may_be_lost(watched):
    run = watched(open_=False)
    run.thread.write(1, {})
    assert run.server.asked.wait(30)
    run.thread.write(2, {})
    run.ended(seconds=1.2)
    assert run.said[0].startswith("waiting for the tracker Server, 0 s at most (tracker.end_time")
    assert run.said[1:] == [
        "the tracker Server did not end in time: the call that is under way and 2 more may be lost "
        "there. metrics.jsonl has all metrics"
    ]
    run.server.open.set()


def test_trackers_without_a_place_for_adapters_are_spared_them(tmp_path):
    class Plain(Tracker):
        def __init__(self): ...

        def write(self, step, metrics): ...

    run = Watched(tmp_path, Plain())
    run.adapter(1)
    assert not run.folder.exists() and run.thread.adapters == 0
    run.ended()


def test_how_long_is_waited_is_a_setting_of_all_trackers_and_of_none_an_error():
    assert TrackerConfig().end_timeout_s == 600
    config = override(RunConfig(), ["tracker=tensorboard", "tracker.end_timeout_s=5"])
    assert config.tracker.end_timeout_s == 5
    with pytest.raises(ConfigError, match="end_timeout_s=5 has no effect with tracker=none"):
        override(RunConfig(), ["tracker.end_timeout_s=5"])
