"""versions.json of a run directory: the packages that a run has trained with, since which step.

A list of {"after_step": the step that the run began with or went on after, "versions": {package:
version}}, one entry for each time they changed. They are those of the machine that drives the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_moe_rl import __version__
from lora_moe_rl.files.replacing import replace_file
from lora_moe_rl.upstream.versions import TESTED, VLLM_BUILDS, installed

FILE = "versions.json"
Versions = dict[str, str]


def here() -> Versions:
    """Of this machine: of what this project is tested with, as far as it is installed."""
    packages = [name for name in TESTED if name not in VLLM_BUILDS]
    found = {name: installed(name) for name in (*packages, *VLLM_BUILDS)}
    return {"lora_moe_rl": __version__} | {name: one for name, one in found.items() if one}


def note(run: Path, step: int, versions: Versions) -> None:
    """Writes down that the run goes on after `step` with these. What an earlier life of it has
    noted of later steps is replaced."""
    entries = [entry for entry in _entries(run) if entry["after_step"] < step]
    if not entries or entries[-1]["versions"] != versions:
        entries.append({"after_step": step, "versions": versions})
    replace_file(run / FILE, (json.dumps(entries, indent=1) + "\n").encode())


def at(run: Path, step: int) -> Versions | None:
    """Those that made `step`; None where the run has no record of them."""
    found = [entry for entry in _entries(run) if entry["after_step"] < step]
    return found[-1]["versions"] if found else None


def _entries(run: Path) -> list[dict[str, Any]]:
    """In the order of their steps; none where the file is not there or no such list."""
    try:
        found = json.loads((run / FILE).read_text(encoding="utf-8"))
        entries = [one for one in found if isinstance(one["versions"], dict)]
        return sorted(entries, key=lambda entry: int(entry["after_step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return []
