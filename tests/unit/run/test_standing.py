"""A process that is stopped and goes on later: its time-outs have not passed meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lora_moe_rl.run.standing import Loop

pytestmark = pytest.mark.seconds

HELPERS = Path(__file__).parents[2] / "helpers"
# A reward that takes half a second, of three at most. It is stopped, too, and goes on a moment
# after the run, which has called it.
PROGRAM = """
import asyncio, sys
from reward_calls import runner_of, sample_of
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.run.standing import Loop

async def scored(runner):
    print("begins", flush=True)
    scores = await runner.score(Prompt(0, "", [1]), [sample_of(2, "x")])
    print(scores.rewards.tolist(), scores.failures)

def main():
    with runner_of(sys.argv[1] + ":slow", timeout_s=3, workers=1) as runner:
        asyncio.run(scored(runner), loop_factory=Loop if sys.argv[2] == "standing" else None)

main()
"""


@pytest.mark.parametrize(("loop", "told"), [("standing", "[1.0] []"), ("usual", "took longer")])
def test_what_was_under_way_while_a_run_was_stopped_is_in_time(tmp_path, loop, told):
    """With asyncio's own loop it is late: the test can tell."""
    (tmp_path / "slow.py").write_text(
        "import time\ndef slow(completions, **_):\n    time.sleep(0.5)\n    return [1.0]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "slow.py"), loop]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None and child.stdout.readline() == "begins\n"
    time.sleep(0.1)
    (worker,) = psutil.Process(child.pid).children()
    for process in (worker, child):
        process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    child.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    with suppress(psutil.NoSuchProcess):  # it was late, and is ended
        worker.send_signal(signal.SIGCONT)
    assert told in child.communicate(timeout=60)[0]


def test_its_clock_never_goes_back_and_is_otherwise_the_kernels():
    begun = time.monotonic()

    async def clock() -> list[float]:
        loop = asyncio.get_running_loop()
        return [loop.time() for _ in range(100) if await asyncio.sleep(0.001) is None]

    found = asyncio.run(clock(), loop_factory=Loop)
    assert found == sorted(found) and begun <= found[0] and found[-1] <= time.monotonic()
    assert not [thread for thread in threading.enumerate() if thread.name == "clock"]


def test_what_a_ctrl_c_breaks_off_is_told_once(caplog):
    """Nothing of tasks that it ended, nor of those that never came to their end."""

    async def broken_off():
        raise KeyboardInterrupt

    async def steps():
        waiting = asyncio.create_task(asyncio.sleep(60))
        await asyncio.gather(asyncio.create_task(broken_off()), waiting)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(steps(), loop_factory=Loop)
    gc.collect()
    assert not caplog.records


def test_errors_of_tasks_are_told_as_ever(caplog):
    async def fails():
        raise ValueError("no such luck")

    async def steps():
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        del task
        gc.collect()

    asyncio.run(steps(), loop_factory=Loop)
    assert "no such luck" in caplog.text
