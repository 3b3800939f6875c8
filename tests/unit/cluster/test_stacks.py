"""The Python stacks of processes that do not answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from lora_moe_rl.cluster import stacks

ACTOR = """
import sys, os, time
from lora_moe_rl.cluster.log import redirect
redirect(sys.argv[1])
def waits_in_the_child():
    time.sleep(600)
def waits_here():
    if os.fork() == 0:
        waits_in_the_child()
    print("there", flush=True)
    time.sleep(600)
waits_here()
"""


def wait_for(text, log) -> str:
    deadline = time.monotonic() + 60
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline, log.exists() and log.read_text()
        time.sleep(0.05)
    return log.read_text()


def test_an_actor_and_what_it_has_forked_write_their_stacks_into_its_log(tmp_path):
    log = tmp_path / "trainer-0.log"
    actor = subprocess.Popen([sys.executable, "-c", ACTOR, str(log)], start_new_session=True)
    plain = subprocess.Popen(["sleep", "600"])
    try:
        wait_for("there", log)
        places = [("trainer-0", actor.pid, log), ("engine-0", plain.pid, tmp_path / "no")]
        places.append(("elsewhere", None, tmp_path / "no"))
        assert stacks.dump(places) == ["trainer-0"]
        wait_for("in waits_here", log)
        assert f"stacks of processes {actor.pid}, " in wait_for("in waits_in_the_child", log)
        assert plain.poll() is None and actor.poll() is None  # the signal would have ended them
        assert not (tmp_path / "no").exists()
    finally:
        for pid in stacks.listening(actor.pid):
            subprocess.run(["kill", "-9", str(pid)], check=True)
        plain.kill()
        actor.wait()
        plain.wait()


def test_a_process_that_is_gone_is_not_asked(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert stacks.dump([("trainer-0", ended.pid, tmp_path / "no")]) == []


def test_the_stacks_of_the_runs_own_tasks_and_threads(tmp_path):
    async def never_comes():
        await asyncio.sleep(600)

    async def learn():
        await never_comes()

    async def look():
        task = asyncio.create_task(learn())
        await asyncio.sleep(0)
        stacks.append_own(tmp_path / "controller.log")
        task.cancel()

    asyncio.run(look())
    text = (tmp_path / "controller.log").read_text()
    assert "in learn" in text and "in never_comes" in text and "Thread MainThread:" in text
