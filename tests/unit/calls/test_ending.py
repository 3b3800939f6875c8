"""What a process that calls a user's functions leaves when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from lora_moe_rl.calls.ending import MARK

CHILD = """
import tempfile, time
from multiprocessing import Pipe
from lora_moe_rl.calls.child import read_ahead
from lora_moe_rl.calls.ending import folder_prefix
ours, theirs = Pipe()
read_ahead(theirs)
print(tempfile.mkdtemp(prefix=folder_prefix("sandbox")), flush=True)
ours.close()
time.sleep(60)
"""


def test_a_process_whose_parent_is_gone_takes_its_temporary_folders_along():
    ran = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ | {MARK: "0123456789abcdef"},
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    folder = Path(ran.stdout.strip())
    assert folder.name.startswith("sandbox-0123456789abcdef-") and not folder.exists()
