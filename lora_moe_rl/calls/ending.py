"""The end of a process that calls a user's functions: nothing of what it has started is left."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from lora_moe_rl.cluster.watchdog import kill_marked

# In the environment of such a process, and so of all that it starts: by it they are found again.
MARK = "LORA_MOE_RL_CALL_WORKER"


def folder_prefix(name: str) -> str:
    """How a temporary folder has to be called that is to go when this process is ended."""
    return f"{name}-{os.environ.get(MARK, 'none')}-"


def end_marked(*marks: str) -> None:
    """Ends what has one of the marks, and removes the temporary folders that it had made."""
    kill_marked(MARK, *marks)
    remove_folders(*marks)


def remove_folders(*marks: str) -> None:
    for mark in marks:
        for folder in Path(tempfile.gettempdir()).glob(f"*-{mark}-*"):
            shutil.rmtree(folder, ignore_errors=True)
