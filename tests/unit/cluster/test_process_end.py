"""How a process has ended, asked by one that is not its parent."""

import gc
import os
import platform
import subprocess
import sys

import pytest

from lora_moe_rl.cluster.process_end import Watched

KERNEL_TELLS = pytest.mark.skipif(
    tuple(map(int, platform.release().split("-")[0].split(".")[:2])) < (6, 15),
    reason="Linux tells it from 6.15 on",
)

# A parent whose child says its own pid, waits for a line, and ends as it is told.
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c",
    "import os, signal, sys; print(os.getpid(), flush=True); exec(sys.stdin.readline())"])
"""


@KERNEL_TELLS
@pytest.mark.parametrize(
    ("deed", "end"),
    [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL")],
)
def test_the_end_of_anothers_child(deed, end):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    watched = Watched(int(parent.stdout.readline()))
    parent.communicate(deed + "\n", timeout=60)
    assert watched.how_it_ended() == end


@KERNEL_TELLS
def test_one_that_lives_has_not_ended():
    watched = Watched(os.getpid())
    assert watched.how_it_ended() is None


def test_nothing_stays_open_of_one_that_nobody_asks_about_any_more():
    gc.collect()  # what tests before this one have left open
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        watched = Watched(os.getpid())
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
        del watched
    assert os.listdir("/proc/self/fd") == before
