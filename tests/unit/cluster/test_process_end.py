"""How a process has ended, asked by one that is not its parent."""

import os
import platform
import subprocess
import sys

import pytest

from lora_moe_rl.cluster.process_end import Watched

pytestmark = pytest.mark.skipif(
    tuple(map(int, platform.release().split("-")[0].split(".")[:2])) < (6, 15),
    reason="Linux tells it from 6.15 on",
)

# A parent whose child says its own pid, waits for a line, and ends as it is told.
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c",
    "import os, signal, sys; print(os.getpid(), flush=True); exec(sys.stdin.readline())"])
"""


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
    watched.close()


def test_one_that_lives_has_not_ended():
    watched = Watched(os.getpid())
    assert watched.how_it_ended() is None
    watched.close()
