"""A run of a recipe for a benchmark, which is not made again when it is whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.telemetry.metrics import read_steps

RECIPE = Path(__file__).parents[2] / "recipes/tiny_arithmetic.py"


def run(
    name: str, folder: Path, recipe: Path, steps: int, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """The records of a run with these settings, read where it is whole already; what it says goes
    to stderr. Raises BenchmarkError when it does not come to its end."""
    if not (found := _records(folder, steps)):
        command = [sys.executable, "-m", "lora_moe_rl", "train", str(recipe)]
        command += [f"trainer.steps={steps}", *settings, f"logging.run_dir={folder}"]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode or not (found := _records(folder, steps)):
            raise BenchmarkError(
                f"{name} ended with exit code {done.returncode} before step {steps}; what it said "
                f"is above, its logs are in {folder}/logs. Runs that are whole are kept"
            )
    return found


def _records(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Of a run that is whole; else none."""
    file = folder / "metrics.jsonl"
    records = read_steps(file) if file.exists() else []
    return records if [record["step"] for record in records] == list(range(1, steps + 1)) else []
