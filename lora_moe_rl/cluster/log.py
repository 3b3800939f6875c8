"""Where an actor's output goes: into its own file of the run directory."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def redirect(log_path: str | Path) -> None:
    """Sends all that this process prints, in C code too, to the end of `log_path`.

    For an actor, first thing: descriptors 1 and 2 are replaced, so that processes it starts (vLLM's
    workers) write there too. A crash in native code leaves its Python stack there.
    """
    path = Path(log_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Ray, like pytest, may have put other objects here than those over 1 and 2.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr, force=True)
