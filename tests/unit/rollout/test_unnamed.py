"""Shared memory whose name is gone, and that is there as long as somebody has it."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

from lora_moe_rl.rollout import unnamed

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
        resource_tracker.unregister(f"/{mine.name}", "shared_memory")
        mine.close()
