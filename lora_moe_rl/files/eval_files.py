"""Samples of evaluations in a run directory: `eval/step-000010.jsonl`, one file an evaluation,
whole or not at all. Nothing in it depends on a clock: equal evaluations make equal files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.files.jsonl import to_json
from lora_moe_rl.files.replacing import replace_file

FOLDER = "eval"


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
