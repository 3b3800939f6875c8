"""`lora-moe-rl bench colocated`: trainer and engine that take turns, against both at once."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from lora_moe_rl.bench import report
from lora_moe_rl.bench.process import held_bytes
from lora_moe_rl.bench.recipe_run import run
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.bench.step import Work, make_config
from lora_moe_rl.config.options import above_zero, positive, result_parser
from lora_moe_rl.telemetry.names import STEP_SECONDS
from lora_moe_rl.verify.report import table

ABOUT = """\
Trains a tiny model with random weights on the CPU, once with placement.mode=split and once with
colocated, on long prompts: the activations of a step and the cache of keys and values are most of
the memory. Compares the most that all processes of a run hold at once (each page counts once), and
whether both train the same adapter, to the bit. The trainer's routers choose by themselves: routes
of an engine depend, near a tie, on what it happens to batch together.
"""
TURNS = "colocated"
ADAPTER = "adapter/adapter_model.safetensors"
WORK = Work(prompts=8, group=8, tokens=16)
PROMPT, LENGTH = 480, 512  # tokens: of a prompt, and with its response at most
EVERY_S = 0.2
MOST_PEAK = 0.7  # over that of split


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench colocated", ABOUT)
    parser.add_argument("--steps", type=positive, default=2, help="of each run (2)")
    parser.add_argument("--cache-gib", type=above_zero, default=3.0, help="of keys and values (3)")
    parser.add_argument("--prompts", type=positive, default=WORK.prompts, help="of a step (8)")
    options = parser.parse_args(argv)
    busy = busy_cores()
    with temporary() as folder:
        work = WORK._replace(prompts=options.prompts)
        recipe = write_run(Path(folder), options.steps, work)
        settings = [
            f"model.max_length={LENGTH}",
            f"trainer.micro_batch_tokens={work.prompts * work.group * LENGTH}",
            f"rollout.cpu_kv_cache_gib={options.cache_gib}",
            "replay.mode=off",
            "trainer.share_prompts=off",  # or there would be few activations
        ]
        runs = {
            mode: measure(mode, Path(folder), recipe, options.steps, settings)
            for mode in ("split", TURNS)
        }
        adapters = [(Path(folder) / mode / ADAPTER).read_bytes() for mode in runs]
    peaks = [runs[mode]["peak"] for mode in (TURNS, "split")]
    result = {
        "runs": runs,
        "cache_gib": options.cache_gib,
        "cores": cores(),
        "busy_cores_before": busy,
        "goals": {
            "peak, over that of split": goal(peaks[0] / peaks[1], MOST_PEAK),
            "adapters that are equal to the bit": goal(float(adapters[0] == adapters[1]), 1, True),
        },
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def write_run(folder: Path, steps: int, work: Work) -> Path:
    """The recipe, with its model and its prompts."""
    from lora_moe_rl.bench.model import make_model
    from lora_moe_rl.config.files import to_yaml

    make_model(folder / "model")
    draw = random.Random(0)
    lines = ("".join(draw.choices("0123456789+", k=PROMPT)) for _ in range(steps * work.prompts))
    rows = (json.dumps({"prompt": line}) + "\n" for line in lines)
    (folder / "prompts.jsonl").write_text("".join(rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(to_yaml(make_config(folder, steps, work)))
    return recipe


def measure(mode: str, folder: Path, recipe: Path, steps: int, settings: Sequence[str]) -> Result:
    with watched() as peak:
        asked = [*settings, f"placement.mode={mode}"]
        records = run(mode, folder / mode, recipe, steps, asked)
    found: Result = {"peak": peak[0], "step": mean(one[STEP_SECONDS] for one in records)}
    for name in ("given_back", "give_way_seconds", "come_back_seconds"):
        if values := [one[key] for one in records if (key := f"placement/{name}") in one]:
            found[name] = values[0] if name == "given_back" else mean(values)
    return found


@contextmanager
def watched() -> Iterator[list[int]]:
    """The most bytes that all processes which this one started have held at once meanwhile."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        own = psutil.Process(os.getpid())
        while not done.wait(EVERY_S):
            peak[0] = max(peak[0], sum(held_bytes(one.pid) for one in own.children(recursive=True)))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def parts(result: Result) -> Iterable[Any]:
    yield f"cache of {result['cache_gib']:g} GiB, float32, {result['cores']} cores"
    shown = table(["", *result["runs"]])
    rows = {
        "all processes at most, GiB": ("peak", 2**30),
        "a step, s": ("step", 1),
        "the engine gives back at first, GiB": ("given_back", 1),
        "giving way, s": ("give_way_seconds", 1),
        "coming back, s": ("come_back_seconds", 1),
    }
    for name, (key, unit) in rows.items():
        cells = (f"{one[key] / unit:.2f}" if key in one else "" for one in result["runs"].values())
        shown.add_row(name, *cells)
    yield shown
