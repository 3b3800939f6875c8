"""What a process has started ends with it, however it ends."""

import os
import subprocess
import sys

import psutil
import pytest

from lora_moe_rl.cluster import watchdog

DRIVER = """
import subprocess, sys
from lora_moe_rl.cluster.watchdog import watch
watch()
start = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
orphan = subprocess.run(["sh", "-c", start], capture_output=True, text=True).stdout.strip()
child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
print(child, orphan, flush=True)
sys.stdin.readline()
"""

# As Ray's agents are: without the mark, and their parent is gone before the driver is.
UNMARKED = """
import subprocess, sys, psutil
from lora_moe_rl.cluster.watchdog import tell, watch
watch()
shell = subprocess.Popen(["sh", "-c", "env -i sleep 600 & wait"])
sleeps = []
while not (sleeps and sleeps[0].name() == "sleep"):
    sleeps = psutil.Process(shell.pid).children()
tell()
shell.kill()
shell.wait()
print(sleeps[0].pid, flush=True)
sys.stdin.readline()
"""


def start(source: str) -> tuple[subprocess.Popen, list[psutil.Process], psutil.Process]:
    """A driver, what it says it has started, and its watchdog."""
    driver = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    started = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    (dog,) = [
        p for p in psutil.Process(driver.pid).children() if "watchdog" in " ".join(p.cmdline())
    ]
    return driver, started, dog


@pytest.mark.parametrize(("source", "count"), [(DRIVER, 2), (UNMARKED, 1)], ids=["marked", "told"])
def test_what_a_killed_process_has_started_ends_with_it(source, count):
    driver, started, dog = start(source)
    assert len(started) == count and all(process.is_running() for process in started)
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs([*started, dog], timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_what_a_killed_process_has_made_for_itself_is_removed(tmp_path):
    token, sockets = tmp_path / "token", tmp_path / "sockets"
    token.touch()
    sockets.mkdir()
    (sockets / "engine").touch()
    driver, started, dog = start(DRIVER.replace("watch()", f"watch({[str(token), str(sockets)]})"))
    assert token.exists() and sockets.exists()
    driver.kill()
    driver.wait()
    psutil.wait_procs([*started, dog], timeout=30)
    assert not list(tmp_path.iterdir())


def test_what_the_kernel_does_not_end_is_named_and_not_waited_for(monkeypatch, caplog):
    """As a process is that waits for a server of files which does not answer."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "TEST_MARK": "of this"}) as stuck:
        monkeypatch.setattr(watchdog, "KILL_S", 1.0)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(psutil.Process, "kill", lambda process: None)
            watchdog.kill_marked("TEST_MARK", "of this")
        assert f"not gone: process {stuck.pid}" in caplog.text
        caplog.clear()
        watchdog.kill_marked("TEST_MARK", "of this")
        assert not caplog.text and not psutil.pid_exists(stuck.pid)
