"""Samples of evaluations in a run directory: `eval/step-000010.jsonl`, one file an evaluation,
whole or not at all. Nothing in it depends on a clock: equal evaluations make equal files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.files.jsonl import to_json
from lora_moe_rl.files.replacing import replace_file
from lora_moe_rl.files.trouble import Trouble

FOLDER = "eval"
WHAT = "samples of an evaluation"


def path_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06d}.jsonl"


def write(run: Path, step: int, records: Sequence[dict[str, Any]]) -> None:
    """Replaces what an evaluation of this step has left that is not on record."""
    path = path_of(run, step)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, "".join(to_json(record) + "\n" for record in records).encode())


def rewind(run: Path, step: int) -> None:
    """Sets aside those of later steps, as `<file>.bak`: the run goes on from `step`."""
    for path in (run / FOLDER).glob("step-*.jsonl"):
        if int(path.stem.removeprefix("step-")) > step:
            path.replace(path.with_name(path.name + ".bak"))


class EvalFiles:
    """Those of a run, as they are made. The newest that the disk refuses waits in memory for the
    next evaluation, or the run's end; what is lost is said."""

    def __init__(self, run: Path, trouble: Trouble):
        self.run, self.trouble = run, trouble
        self._waiting: tuple[int, Sequence[dict[str, Any]]] | None = None

    def write(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Never raises for what the disk refuses."""
        self.close()
        self._waiting = step, records
        self._flush()

    def close(self) -> None:
        """Tries once more what waits, for the last time."""
        self._flush()
        if self._waiting is not None:
            self.trouble.say(f"{WHAT}, that after step {self._waiting[0]}, are lost")
            self._waiting = None

    def _flush(self) -> None:
        if self._waiting is None:
            return
        try:
            write(self.run, *self._waiting)
        except OSError as error:
            waits = f"those after step {self._waiting[0]} wait in memory"
            self.trouble.failed(WHAT, f"{error.strerror or error}; {waits}")
        else:
            self._waiting = None
            self.trouble.mended(WHAT)
