"""A run of a recipe for a benchmark, which is not made again when it is whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import read_config_file
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.config.recipes import resolved
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.files.unchanged import flat, flat_of
from lora_moe_rl.telemetry.metrics import read_steps

SHOWN = 4
RECIPE = Path(__file__).parents[2] / "recipes/tiny_arithmetic.py"


def run(
    name: str, folder: Path, recipe: Path, steps: int, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """The records of a run with these settings, read where it is whole already; what it says goes
    to stderr. Raises BenchmarkError when it does not come to its end, and where a run of other
    settings stands in its place."""
    asked = [f"trainer.steps={steps}", *settings, f"logging.run_dir={folder}"]
    if found := _records(folder, steps):
        _check_same(name, folder, resolved(str(recipe), asked))
    else:
        command = [sys.executable, "-m", "lora_moe_rl", "train", str(recipe), *asked]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode or not (found := _records(folder, steps)):
            raise BenchmarkError(
                f"{name} ended with exit code {done.returncode} before step {steps}; what it said "
                f"is above, its logs are in {folder}/logs. Runs that are whole are kept"
            )
    return found


def _check_same(name: str, folder: Path, config: RunConfig) -> None:
    file = folder / "config.yaml"
    saved = flat(read_config_file(file)) if file.exists() else {}
    now = flat_of(config)
    other = [
        f"{key}={value_text(saved.get(key))} (now {value_text(now.get(key))})"
        for key in sorted(saved.keys() | now.keys(), key=lambda one: (one[-5:] != ".name", one))
        if saved.get(key) != now.get(key) and not key.startswith("logging.")
    ]
    if other:
        more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        raise BenchmarkError(
            f"{name}: {folder} holds a run of other settings: {', '.join(other[:SHOWN])}{more}; "
            "choose another directory with --out, or delete it"
        )


def _records(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The records of a run that is whole; else none."""
    file = folder / "metrics.jsonl"
    records = read_steps(file) if file.exists() else []
    return records if [record["step"] for record in records] == list(range(1, steps + 1)) else []
