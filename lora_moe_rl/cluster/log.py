"""Where an actor's output goes: into its own file of the run directory."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path

from lora_moe_rl.cluster import stacks

# What these loggers say below an error (Python's warnings are the first) is about what a library
# found at its import, at length; it would push what matters out of the last lines of the log.
CHATTY = ("py.warnings", "megatron", "transformer_engine", "apex")
OWN_HANDLER = "megatron.bridge.utils.import_utils"  # prints besides what its parents log
FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def redirect(log_path: str | Path) -> None:
    """Sends all that this process prints, in C code too, to the end of `log_path`.

    For an actor, first thing: descriptors 1 and 2 are replaced, so that processes it starts (vLLM's
    workers) write there too. A crash in native code leaves its Python stack there, and who asks for
    stacks (`stacks.py`) finds them there.
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
    faulthandler.register(stacks.SIGNAL, sys.stderr, all_threads=True)
    logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr, force=True)
    _set_chatter_aside(path.with_suffix(".libraries.log"))


def _set_chatter_aside(path: Path) -> None:
    """Into a file of its own: `trainer-0.libraries.log` beside `trainer-0.log`."""
    aside = logging.FileHandler(path, delay=True)
    aside.setFormatter(logging.Formatter(FORMAT))
    aside.addFilter(_is_chatter)
    (handler,) = logging.root.handlers
    handler.addFilter(lambda record: not _is_chatter(record))
    logging.root.addHandler(aside)
    logging.captureWarnings(True)

    def only_aside(record: logging.LogRecord) -> bool:
        if _is_chatter(record):
            aside.handle(record)
            return False
        return True

    logging.getLogger(OWN_HANDLER).addFilter(only_aside)


def _is_chatter(record: logging.LogRecord) -> bool:
    chatty = any(record.name == name or record.name.startswith(f"{name}.") for name in CHATTY)
    return chatty and record.levelno < logging.ERROR
