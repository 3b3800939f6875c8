"""Whatever a worker does, the event loop that gives it jobs goes on, and a time-out fires."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from lora_moe_rl.calls import wire
from lora_moe_rl.data.samples import Prompt
from tests.helpers.reward_calls import runner_of, sample_of

pytestmark = pytest.mark.seconds  # starts processes
FUNCTIONS = '''
import asyncio, os, re, signal, sys, time

def deed(prompts, completions):
    """The prompt says what to do; any other prompt gets ones."""
    match prompts[0]:
        case "keep the lock": re.match(r"(a+)+$", "a" * 64 + "b")
        case "stop": os.kill(os.getpid(), signal.SIGSTOP)
        case "stop in an answer":
            os.write(int(sys.argv[1]), (1000).to_bytes(4) + b'{"number"')
            os.kill(os.getpid(), signal.SIGSTOP)
        case "flood": os.write(int(sys.argv[1]), (1 << 30).to_bytes(4) + b"x")
        case "no JSON": os.write(int(sys.argv[1]), (3).to_bytes(4) + b"abc")
        case "answer to nothing":
            told = b'{"number": 12345, "outcome": {"outcome": [9.0]}}'
            os.write(int(sys.argv[1]), len(told).to_bytes(4) + told)
    return [1.0] * len(completions)

async def at_once(prompts, completions):
    if prompts[0] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)

def whoami(prompts, completions):
    return [float(os.getpid())]
'''
LONG = "x" * 300_000  # more than a socket holds that nobody reads from


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("calls") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@contextmanager
def not_frozen(seconds: int = 60) -> Iterator[None]:
    """Raises where this thread stands after `seconds`, also in a call of the kernel."""

    def frozen(*_):
        raise AssertionError(f"the event loop stands still for {seconds} s")

    before = signal.signal(signal.SIGALRM, frozen)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # it may stand in more than one call
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def longest_pause(pauses: list[float]) -> None:
    """How long others waited for the event loop, at most."""
    pauses.append(0.0)
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.05)
        pauses[0] = max(pauses[0], time.monotonic() - before - 0.05)


def score(runner, *texts: str) -> tuple[list[float], list[str], float]:
    """The reward of each prompt, scored at the same time, the failures, and the longest pause."""

    async def together():
        pauses: list[float] = []
        watch = asyncio.create_task(longest_pause(pauses))
        prompts = [Prompt(row, text, [1], {}) for row, text in enumerate(texts)]
        found = await asyncio.gather(*(runner.score(one, [sample_of(1, LONG)]) for one in prompts))
        watch.cancel()
        return found, pauses[0]

    with not_frozen():
        found, pause = asyncio.run(together())
    return [r.item() for r, *_ in found], [line for _, lines, _ in found for line in lines], pause


@pytest.mark.parametrize("evil", ["keep the lock", "stop", "stop in an answer"])
def test_one_that_reads_nothing_more_holds_up_nobody_and_is_ended_in_time(functions, evil):
    """A megabyte of jobs waits behind it."""
    with runner_of(f"{functions}:deed", timeout_s=2, workers=1) as runner:
        rewards, failures, pause = score(runner, evil, *["good"] * 5)
    assert np.isnan(rewards[0]) and rewards[1:] == [1.0] * 5
    assert len(failures) == 1 and "took longer than reward.timeout_s=2" in failures[0]
    assert pause < 5  # a loaded machine has its own; stuck it would be for ever


def test_an_async_one_that_is_stopped_holds_up_nobody_and_what_it_was_not_sent_is_done(functions):
    # What it was sent is given up; a loaded machine does the rest in as long.
    with runner_of(f"{functions}:at_once", timeout_s=8) as runner:
        rewards, failures, pause = score(runner, "stop", *["good"] * 11)
    assert np.isnan(rewards[0]) and rewards[-1] == 1.0
    assert len(failures) == np.isnan(rewards).sum() < 6
    assert all("took longer than reward.timeout_s=8" in line for line in failures)
    assert pause < 5


@pytest.mark.parametrize(
    ("evil", "told"),
    [
        ("flood", "sent 1,073,741,824 bytes; an answer may have up to 67,108,864"),
        ("no JSON", "sent what is no JSON"),
        ("answer to nothing", "sent an answer to nothing"),
    ],
)
def test_what_is_no_answer_ends_who_has_sent_it(functions, evil, told):
    with runner_of(f"{functions}:deed", timeout_s=60, workers=1) as runner:
        rewards, failures, _ = score(runner, evil, "good")
    assert np.isnan(rewards[0]) and rewards[1] == 1.0
    assert len(failures) == 1 and told in failures[0]


def test_one_that_has_ended_with_nothing_to_do_costs_no_call(functions):
    with runner_of(f"{functions}:whoami", timeout_s=60, workers=1) as runner:
        (first,), *_ = score(runner, "a")
        worker = runner.pool.workers[0]
        os.kill(worker.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        (second,), failures, _ = score(runner, "a")
    assert not failures and second not in (first, np.nan)


def test_what_nobody_waits_for_any_more_is_not_called(functions, tmp_path):
    (tmp_path / "writes.py").write_text(
        "import pathlib, time\n"
        "def reward(prompts, completions, folder):\n"
        "    (pathlib.Path(folder) / prompts[0]).touch()\n"
        "    time.sleep(1)\n"
        "    return [1.0]\n"
    )
    (folder := tmp_path / "here").mkdir()

    async def given_up():
        calls = [
            asyncio.create_task(runner.score(Prompt(0, text, [1], {}), [sample_of(1, "x")]))
            for text in "abc"
        ]
        while not list(folder.iterdir()):
            await asyncio.sleep(0.01)
        calls[0].cancel()
        calls[1].cancel()
        await calls[2]

    spec = f"{tmp_path}/writes.py:reward"
    with runner_of(spec, timeout_s=60, workers=1, folder=str(folder)) as runner:
        asyncio.run(given_up())
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]


def test_more_than_can_be_sent_is_refused_by_its_size(monkeypatch):
    monkeypatch.setattr(wire.pickle, "dumps", lambda message: Enormous())
    with pytest.raises(ValueError, match="2,147,483,648 bytes are too many"):
        wire.framed({})


class Enormous:
    def __len__(self) -> int:
        return 1 << 31
