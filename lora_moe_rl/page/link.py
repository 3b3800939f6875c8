"""Where a run is shown: the command that opens its page, and the address of the run on it."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import quote, urlencode

HOST, PORT = "127.0.0.1", 7420


def link(name: str, port: int = PORT) -> str:
    """The address that shows the run of this name alone. The page reads it as `state.js` writes it:
    a name is encoded once as one of a list with commas, and once more as a part of an address."""
    return f"http://{HOST}:{port}/#{urlencode({'runs': quote(name, safe='')})}"


def line(run_dir: Path) -> str:
    """The command and the address, as a run says them at its end. The page is that of the folder
    which the run directory stands in, so that other runs stand beside it."""
    path = run_dir.resolve()  # a link is not followed from the folder that it stands in
    return f"lora-moe-rl view {shlex.quote(str(path.parent))}  then {link(path.name)}"
