"""A signal that asks a run to end is heard, also where the exception it raises is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from lora_moe_rl.run import start
from lora_moe_rl.run.signals import ENDING, interrupts, raise_what_was_lost


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_the_run_starts_is_an_interrupt(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupts():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", ENDING)
def test_one_that_nobody_heard_of_ends_the_run_before_its_first_step(number):
    before, stepped = signal.getsignal(number), False
    records: Any = SimpleNamespace(stop_requested=False)
    with pytest.raises(KeyboardInterrupt), interrupts():
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)  # as in a callback of a library
        with start._signals(records):
            stepped = True
    assert not stepped and signal.getsignal(number) is before


def test_what_was_heard_in_an_earlier_run_is_forgotten():
    with pytest.raises(KeyboardInterrupt), interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    with interrupts():
        raise_what_was_lost()


def test_with_the_run_under_way_the_first_signal_asks_and_the_second_ends(capsys):
    records: Any = SimpleNamespace(stop_requested=False)
    with interrupts(), pytest.raises(KeyboardInterrupt), start._signals(records):
        os.kill(os.getpid(), signal.SIGINT)
        assert records.stop_requested
        os.kill(os.getpid(), signal.SIGINT)


def test_a_terminal_that_is_closed_asks_once_however_often_it_is_told(capsys):
    """Bash passes it on when it hears of it, and the kernel tells once more as bash ends."""
    records: Any = SimpleNamespace(stop_requested=False)
    with interrupts(), pytest.raises(KeyboardInterrupt), start._signals(records):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert records.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)


def test_while_a_run_starts_too(capsys):
    with pytest.raises(KeyboardInterrupt), interrupts():
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:  # what was started is ended
            os.kill(os.getpid(), signal.SIGHUP)
            ended = True
    assert ended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_in_a_scripts_background_hears_of_it_all_the_same(number):
    """A shell without job control has SIGINT ignored in what it starts with `&`."""
    before = signal.signal(number, signal.SIG_IGN)
    records: Any = SimpleNamespace(stop_requested=False)
    try:
        with interrupts(), start._signals(records):
            os.kill(os.getpid(), number)
        assert records.stop_requested
    finally:
        signal.signal(number, before)


def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    records: Any = SimpleNamespace(stop_requested=False)
    try:
        with interrupts(), start._signals(records):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not records.stop_requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
