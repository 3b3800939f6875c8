"""A file of a run directory that says what the run has had since which step: a list of
{"after_step": the step that it began with or went on after, KEY: what it had from then on}, one
entry for each time that changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_moe_rl.files.replacing import replace_file


@dataclass(frozen=True)
class Since:
    """The file `file` of a run directory, whose values, dicts, stand under `key`."""

    file: str
    key: str

    def note(self, run: Path, step: int, value: dict[str, Any]) -> dict[str, Any] | None:
        """Writes down that the run goes on after `step` with `value`. What an earlier life of it
        has noted of later steps is replaced. Returns what it had before; None where it had
        nothing."""
        entries = [entry for entry in self._entries(run) if entry["after_step"] < step]
        before = entries[-1][self.key] if entries else None
        if before != value:
            entries.append({"after_step": step, self.key: value})
        replace_file(run / self.file, (json.dumps(entries, indent=1) + "\n").encode())
        return before

    def at(self, run: Path, step: int) -> dict[str, Any] | None:
        """What made `step`; None where the run has no record of it."""
        found = [entry for entry in self._entries(run) if entry["after_step"] < step]
        return found[-1][self.key] if found else None

    def _entries(self, run: Path) -> list[dict[str, Any]]:
        """The entries in the order of their steps; none where the file is not there or no such
        list."""
        try:
            found = json.loads((run / self.file).read_text(encoding="utf-8"))
            entries = [one for one in found if isinstance(one[self.key], dict)]
            return sorted(entries, key=lambda entry: int(entry["after_step"]))
        except (OSError, ValueError, KeyError, TypeError):
            return []
