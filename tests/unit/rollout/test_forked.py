"""vLLM's processes on the CPU are forks that hold nothing of their parent's but its imports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

PARENT = """
import multiprocessing, os, signal, sys, time
from multiprocessing.connection import wait
from lora_moe_rl.rollout.forked import EngineForkContext

def child(given):
    import torch
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert torch.get_num_threads() == 1
    assert multiprocessing.parent_process().is_alive()
    given.send(os.getpid())
    time.sleep(60)

signal.signal(signal.SIGTERM, lambda *_: None)
context = EngineForkContext()
reader, writer = context.Pipe(duplex=False)
assert context.get_start_method() == "fork"
process = context.Process(target=child, name="EngineCore", kwargs={"given": writer})
process.start()
pid = reader.recv()
assert not wait([process.sentinel], timeout=0.5)  # to its parent it lives
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_does_not_hold_the_sockets_of_a_parent_that_was_killed():
    ours, theirs = socket.socketpair()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        text=True,
    )
    theirs.close()
    child = int(parent.stdout.readline())
    try:
        assert parent.wait() == -signal.SIGKILL
        ours.settimeout(10)
        assert ours.recv(1) == b""  # an end that nobody holds, while the fork still lives
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGTERM)
        ours.close()
        parent.stdout.close()
