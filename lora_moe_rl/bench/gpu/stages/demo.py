"""The demo for a few steps, trainer and engine on one device: a run from end to end.

Nothing is pre-trained here, which takes minutes: without the tiny model in the cache its shape has
random weights, and digits are what is rewarded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lora_moe_rl.bench.gpu.parts import Parts
from lora_moe_rl.bench.model import save_tiny
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.tiny.make import find_tiny

TINY = "qwen3_moe"
ROOT = Path(__file__).resolve().parents[4]
RECIPE = ROOT / "recipes/tiny_arithmetic.py"
STEPS = 6
SETTINGS = [
    "trainer.world_size=1", "trainer.ep=1", f"trainer.steps={STEPS}", "replay.compare_every=1",
]  # fmt: skip
# Both on one GPU.
SHARED = [
    "trainer.gpus_per_rank=0.5", "rollout.gpus_per_engine=0.5",
    "rollout.gpu_memory_utilization=0.3",
]  # fmt: skip
READ = (
    "reward/mean", "mismatch/kl", "mismatch/max_abs_logprob_diff", "mismatch/without_replay/kl",
    "mismatch/without_replay/max_abs_logprob_diff", "replay/coverage", "replay/disagreement",
    "optim/grad_norm", "memory/peak", "time/rollout", "time/train", "time/refit", "time/step",
)  # fmt: skip
LOG_LINES = 60  # of each log of a run that failed


def run(parts: Parts, device: str) -> None:
    with tempfile.TemporaryDirectory(prefix="demo-model-") as folder:
        random = find_tiny(TINY) is None
        parts.part("model", lambda: save_random(Path(folder)) if random else "pre-trained")
        settings = [f"model={folder}", f"reward.function={__file__}:digits"] if random else []
        parts.part("steps", lambda: steps(device, *settings))


def save_random(folder: Path) -> str:
    save_tiny(folder, TINY)
    return "random weights"


def digits(completions: list[str], **_) -> list[float]:
    """The share of digits in each: what a model that knows nothing has more or less of."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def steps(device: str, *more: str) -> list[dict[str, float]]:
    """The metrics of each step. Raises BenchmarkError when the run does not end as it should."""
    if not RECIPE.is_file():
        raise BenchmarkError(f"{RECIPE} is not there: run this in a clone of the repository")
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        run_dir = Path(folder) / "run"
        settings = [*SETTINGS, f"trainer.device={device}", f"logging.run_dir={run_dir}"]
        settings += [*more, *(SHARED if device == "cuda" else ())]
        command = [sys.executable, "-m", "lora_moe_rl", "train", str(RECIPE), *settings]
        code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        found = _metrics(run_dir)
        if code or len(found) < STEPS:
            _show_logs(run_dir)
            raise BenchmarkError(f"the run ended with exit code {code} after {len(found)} steps")
    return found


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in READ if name in row} for row in rows]


def _show_logs(run_dir: Path) -> None:
    """Into the log of the stage: the run's own go with its folder."""
    for log in sorted((run_dir / "logs").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print(f"--- {log.name}", *lines, sep="\n")
