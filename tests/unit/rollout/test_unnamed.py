"""Shared memory whose name is gone, and that is there as long as somebody has it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import zmq

from lora_moe_rl.rollout import unnamed

FILES = socket.AF_UNIX
READS = "import sys, mmap; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close();"
READS += "print('open', flush=True); input(); print(bytes(m[:3]).decode())"


def test_what_all_have_open_has_no_name_any_more_and_is_still_there():
    """Also what a process below this one alone has open; what nobody here has stays."""
    mine, others = (SharedMemory(create=True, size=4096) for _ in range(2))
    theirs = unnamed.PLACE / "vllm_dist_of_a_test"
    theirs.write_bytes(b"abc" + b"\0" * 4093)
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", READS, str(theirs)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdout is not None and child.stdout.readline() == "open\n"
        others.close()
        mine.buf[:2] = b"hi"
        assert unnamed.forget_names() == [mine.name, theirs.name]
        assert not theirs.exists() and bytes(mine.buf[:2]) == b"hi"
        assert child.communicate("\n")[0] == "abc\n"
        assert unnamed.forget_names() == []  # it is no longer there by a name
        others.unlink()  # raises where it is gone
    finally:
        theirs.unlink(missing_ok=True)
        mine.close()


CHILD_MADE_IT = """
import multiprocessing as mp
from multiprocessing.shared_memory import SharedMemory

def child(made, done):
    memory = SharedMemory(create=True, size=4096)
    made.put(memory.name)
    done.wait()

if __name__ == "__main__":
    from lora_moe_rl.rollout import unnamed
    spawn = mp.get_context("spawn")
    made, done = spawn.Queue(), spawn.Event()
    process = spawn.Process(target=child, args=(made, done))
    process.start()
    name = made.get()
    assert unnamed.forget_names() == [name]
    process.kill()
    process.join()
"""


def test_pythons_tracker_says_nothing_of_it_when_processes_have_been_killed(tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(CHILD_MADE_IT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "shared_memory" not in done.stderr and "psm_" not in done.stderr, done.stderr


LISTENS = """
import sys, zmq
socket = zmq.Context().socket(zmq.PULL)
socket.bind(f"ipc://{sys.argv[1]}")
for _ in range(3):
    print("there", flush=True)
    print(socket.recv().decode(), flush=True)
"""


def test_a_socket_of_vllms_has_no_name_once_somebody_is_connected(monkeypatch, request):
    """Of a process below this one too; who is connected goes on speaking. Others stay."""
    folder = Path(tempfile.mkdtemp())  # a socket's path is short
    request.addfinalizer(lambda: shutil.rmtree(folder))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(folder))
    theirs, other = folder / str(uuid.uuid4()), folder / "other"
    child = subprocess.Popen(
        [sys.executable, "-c", LISTENS, str(theirs)], stdout=subprocess.PIPE, text=True
    )
    request.addfinalizer(child.kill)
    assert child.stdout is not None

    def said() -> list[str]:
        return [child.stdout.readline().strip() for _ in range(2)]  # type: ignore[union-attr]

    assert child.stdout.readline() == "there\n"
    assert unnamed.forget_names() == [] and theirs.is_socket()  # nobody is connected yet
    with zmq.Context() as context, context.socket(zmq.PUSH) as mine, socket.socket(FILES) as own:
        own.bind(str(other))
        mine.connect(f"ipc://{theirs}")
        mine.send(b"one")
        assert said() == ["one", "there"]
        assert unnamed.forget_names() == [theirs.name]
        assert not theirs.exists() and other.is_socket()
        mine.send(b"two")
        assert said() == ["two", "there"]
        mine.send(b"three")
        assert child.communicate()[0] == "three\n"
