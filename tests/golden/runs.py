"""Short runs whose figures are kept, so that a change of the house that moves a bit is seen.

    python tests/golden/runs.py check  [NAME ...]     run them, and compare with tests/golden
    python tests/golden/runs.py record [NAME ...]     run them, and write tests/golden/NAME.json

Each run has four steps with a checkpoint every two; a copy of it goes on from step 2. Kept are the
records of metrics.jsonl without clocks and without what depends on how the engine happens to batch
requests, samples.jsonl, and the SHA-256 of both adapters. The figures hold for one kind of machine
and one base, which the file names.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
STEPS = ("trainer.steps=4", "checkpoint.every=2", "logging.samples_per_step=8")

RUNS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "deepseek_v3": ("model=deepseek_v3", "trainer.lr=1e-3"),
    "two_engines": ("rollout.engines=2",),
    "r2": ("replay.mode=r2",),
    "off_policy": ("algorithm.epochs=2", "algorithm.mini_batches=2", "algorithm.kl_coef=0.05"),
    "merged": ("refit.mode=merged",),
}
# Clocks; memory; the last bit of the engine's logprobs, which depends on what it batches together,
# and what the proof finds by them; the bytes of the routes' blocks, which depend on what is packed
# together; and how many steps a checkpoint is behind, which is written beside the next ones.
MEASURED = re.compile(
    r"time/.*|idle/.*|perf/.*|memory/.*|placement/.*|refit/(?!bytes).*|.*/tokens_per_second|mismatch/.*|"
    r"replay/bytes|checkpoint/steps_behind"
)


def run(name: str, folder: Path) -> dict[str, Any]:
    """Runs it in `folder`, then goes on from step 2 in a copy. Returns what is kept."""
    whole, resumed = folder / "whole", folder / "resumed"
    _train("recipes/tiny_arithmetic.py", *STEPS, *RUNS[name], f"logging.run_dir={whole}")
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/step-000004")
    _train(str(resumed / "config.yaml"), "--resume", f"logging.run_dir={resumed}")
    kept = figures(whole)
    return kept | {"resumed": {key: figures(resumed)[key] for key in ("metrics", "adapter")}}


def differences(kept: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What of the kept figures is not found again. Keys that are new are no difference."""
    wrong = [] if kept["adapter"] == found["adapter"] else ["adapter differs"]
    if len(kept["samples"]) != len(found["samples"]):
        wrong.append(f"{len(kept['samples'])} samples were there, are {len(found['samples'])}")
    wrong += [
        f"sample {number}: {key} was {value}, is {other.get(key)}"
        for number, (one, other) in enumerate(zip(kept["samples"], found["samples"]))
        for key, value in one.items()
        if other.get(key) != value
    ]
    for one, other in zip(kept["metrics"], found["metrics"], strict=True):
        wrong += [
            f"step {one['step']}: {key} was {value}, is {other.get(key)}"
            for key, value in one.items()
            if not MEASURED.fullmatch(key) and other.get(key) != value
        ]
    return wrong


def check(name: str, folder: Path) -> list[str]:
    """Runs it in `folder` and compares. Raises RuntimeError on another machine, or for a base of
    other weights: the figures say nothing there."""
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    if (here := machine(model_of(name))) != kept["machine"]:
        raise RuntimeError(f"{name}: recorded on {kept['machine']}, this is {here}")
    found = run(name, folder)
    resumed = found["resumed"] | {"samples": kept["samples"]}
    again = differences(kept["resumed"] | {"samples": kept["samples"]}, resumed)
    return differences(kept, found) + [f"resumed: {line}" for line in again]


def figures(run_dir: Path) -> dict[str, Any]:
    """What is kept of one finished run."""
    metrics = [
        {key: value for key, value in record.items() if not MEASURED.fullmatch(key)}
        for record in _lines(run_dir / "metrics.jsonl")
    ]
    adapter = load_file(run_dir / "adapter/adapter_model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(adapter):
        digest.update(name.encode() + adapter[name].tobytes())
    return {
        "metrics": metrics,
        "samples": _lines(run_dir / "samples.jsonl"),
        "adapter": digest.hexdigest(),
    }


def machine(model: str) -> dict[str, str]:
    """What the last bits of the figures depend on."""
    from importlib.metadata import version

    from lora_moe_rl.tiny.make import make_tiny

    weights = (make_tiny(model) / "model.safetensors").read_bytes()
    return {
        "processor": processor(),
        "base": hashlib.sha256(weights).hexdigest(),
        **{name: version(name) for name in ("torch", "numpy", "megatron-core")},
    }


def processor() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found.group(1) if found else platform.processor()


def model_of(name: str) -> str:
    return "deepseek_v3" if name == "deepseek_v3" else "qwen3_moe"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def _train(*arguments: str) -> None:
    command = [sys.executable, "-m", "lora_moe_rl", "train", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def _write(path: Path, kept: dict[str, Any]) -> None:
    """A line a record: so that a difference can be read."""
    text = json.dumps(kept, ensure_ascii=False)
    path.write_text(re.sub(r"(?<=[\[,]) ?(?=\{\"(?:sample|step|row)\")", "\n", text) + "\n")


def main(action: str = "", *names: str) -> int:
    if action not in ("check", "record") or not set(names) <= set(RUNS):
        print(f"runs.py check|record [NAME ...], of {', '.join(RUNS)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            if action == "check":
                wrong = check(name, Path(folder))
                failed += bool(wrong)
                print(name, "; ".join(wrong) or "is equal to the bit", flush=True)
                continue
            kept = {"machine": machine(model_of(name))} | run(name, Path(folder))
        _write(FOLDER / f"{name}.json", kept)
        print(name, kept["adapter"], kept["resumed"]["adapter"], flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
