"""`lora-moe-rl bench step`: one steady step of the whole system, by stage, with TRL beside it.

The run is a real one: controller, Ray actors, Megatron and vLLM, on-policy GRPO with router replay,
LoRA rank 16 on attention and experts of a 2M-parameter Qwen3-MoE, float32. Seconds are medians over
the measured steps. Settings are those of `train`, for our run alone; with schedule.lag stages
overlap, and do not add up to a step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lora_moe_rl.bench import trl_step
from lora_moe_rl.bench.cpu import CpuPerStep
from lora_moe_rl.bench.recipe_run import run as run_recipe
from lora_moe_rl.bench.report import BUSY, busy_cores, conclude, cores, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.telemetry import names
from lora_moe_rl.upstream.versions import TESTED, VLLM_BUILDS, importable, installed
from lora_moe_rl.verify import report

PROMPTS, GROUP, TOKENS, RANK, ALPHA, LR = 16, 8, 8, 16, 32, 1e-3
WARMUP = 3
STAGES = ("rollout", "reward", "train", "refit")
MAX_KL, MAX_DIFF = 1e-6, 1e-4
WORST = {"mismatch/kl": max, "mismatch/max_abs_logprob_diff": max, "replay/coverage": min}
SETTLE_S = 3.0  # in which the actors of our own run end, so as not to count as other programs
TRL_INSTALL = (
    "uv venv trl-env --python 3.12 && uv pip install --python trl-env/bin/python 'trl==1.16.*' "
    "torch==2.13.0 transformers==5.12.1 peft==0.21.2 datasets accelerate; then "
    "lora-moe-rl bench step --trl-python trl-env/bin/python"
)

Record = dict[str, Any]


class Work(NamedTuple):
    """The work of a step; `tokens` of each response."""

    prompts: int = PROMPTS
    group: int = GROUP
    tokens: int = TOKENS

    @property
    def responses(self) -> int:
        """Tokens of all responses."""
        return self.prompts * self.group * self.tokens


USUAL = Work()


def main(argv: Sequence[str]) -> int:
    """Raises BenchmarkError when the run was not right, whatever its speed."""
    parser = result_parser("bench step", __doc__)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as rollout.engines=2")
    parser.add_argument("--steps", type=positive, default=10, help="measured steps (10)")
    parser.add_argument("--prompts", type=positive, default=PROMPTS, help=f"of a step ({PROMPTS})")
    parser.add_argument("--samples", type=positive, default=GROUP, help=f"of a prompt ({GROUP})")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help=f"of each ({TOKENS})")
    parser.add_argument(
        "--trl-python", metavar="PATH", help="an interpreter that has TRL, if this one has not"
    )
    options = parser.parse_intermixed_args(argv)
    work = Work(options.prompts, options.samples, options.tokens)
    with temporary() as folder:
        result = measure(Path(folder), options.steps, work, options.settings)
        result["trl"] = measure_trl(Path(folder), options.steps, options.trl_python, work)
    conclude(result, options.json, parts, runs)
    return 0


def measure(
    folder: Path, steps: int, work: Work = USUAL, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs warm-up and measured steps in `folder`; what the run says goes to stderr."""
    from lora_moe_rl.bench.model import make_model
    from lora_moe_rl.run.start import run
    from lora_moe_rl.telemetry.metrics import read_steps

    config = override(make_config(folder, steps, work), settings)
    busy = busy_cores()
    parameters = make_model(folder / "model")
    ahead = config.schedule.lag + 1
    write_prompts(folder / "prompts.jsonl", work.prompts * (WARMUP + steps + ahead))
    metrics = config.run_dir / "metrics.jsonl"
    with contextlib.redirect_stdout(sys.stderr), CpuPerStep(metrics, WARMUP, WARMUP + steps) as cpu:
        run(config)
    found = figures(read_steps(metrics), steps, work) | {"cpu_seconds": cpu.seconds}
    return {"parameters": parameters, "busy_cores_before": busy, "settings": [*settings]} | found


def figures(records: Sequence[Record], steps: int, work: Work = USUAL) -> dict[str, Any]:
    """What a run of WARMUP + steps has to report. Raises BenchmarkError when its gate is red."""
    if reasons := gate(records, WARMUP + steps, work):
        raise BenchmarkError("no seconds to report, the run was not right: " + "; ".join(reasons))
    return {
        "prompts": work.prompts,
        "samples_per_prompt": work.group,
        "response_tokens": work.tokens,
        "lora_rank": RANK,
        "steps": steps,
        "warmup": WARMUP,
        "cores": cores(),
        "versions": {name: found for name in (*TESTED, *VLLM_BUILDS) if (found := installed(name))},
        **summary(records[WARMUP:], work),
        "worst": {name: worst(record[name] for record in records) for name, worst in WORST.items()},
    }


def make_config(folder: Path, steps: int, work: Work = USUAL, **algorithm: Any) -> RunConfig:
    """All that is not named is the default of a run, `algorithm` of its section."""
    return RunConfig.model_validate(
        {
            "name": "bench",
            "model": {"path": str(folder / "model")},
            "adapter": {"rank": RANK, "alpha": ALPHA},
            "trainer": {"steps": WARMUP + steps, "device": "cpu", "dtype": "float32", "lr": LR},
            "rollout": {"max_response_tokens": work.tokens},
            "algorithm": {"prompts_per_step": work.prompts, "group_size": work.group} | algorithm,
            "data": {"path": str(folder / "prompts.jsonl")},
            "reward": {"function": "lora_moe_rl.bench.trl_step:reward"},
            "checkpoint": {"every": 0},
            "logging": {"run_dir": str(folder / "run"), "progress": False},
        }
    )


def write_run(folder: Path, config: RunConfig) -> Path:
    """The recipe of a `make_config` of this folder, with the model and the prompts that it names. A
    model that is there stays."""
    from lora_moe_rl.bench.model import make_model
    from lora_moe_rl.config.files import to_yaml

    if not (folder / "model").exists():
        make_model(folder / "model")
    prompts = config.algorithm.prompts_per_step * config.trainer.steps
    write_prompts(folder / "prompts.jsonl", prompts)
    recipe = folder / "recipe.yaml"
    recipe.write_text(to_yaml(config))
    return recipe


def run_measured(
    name: str,
    folder: Path,
    recipe: Path,
    steps: int,
    settings: Sequence[str] = (),
    work: Work = USUAL,
) -> list[Record]:
    """The records of `steps` steps after those to warm up. Raises BenchmarkError for a run that was
    not right."""
    records = run_recipe(name, folder, recipe, WARMUP + steps, settings)
    if reasons := gate(records, WARMUP + steps, work):
        raise BenchmarkError(f"{name}: no seconds to report: " + "; ".join(reasons))
    return records[WARMUP:]


def write_prompts(path: Path, count: int) -> None:
    from lora_moe_rl.tiny.arithmetic import problems

    rows = islice(problems(0), count)
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt, _ in rows))


def gate(records: Sequence[Record], steps: int, work: Work = USUAL) -> list[str]:
    """Why the run does not count; empty when it does."""
    reasons = []
    if len(records) != steps:
        reasons.append(f"{len(records)} of {steps} steps are in its metrics")
    for record in records:
        reasons += [f"step {record['step']}: {reason}" for reason in _faults(record, work)]
    versions = [record["adapter/version"] for record in records]
    if versions != list(range(len(versions))):
        reasons.append(f"adapter versions must grow by one a step from 0, they were {versions}")
    return reasons


def _faults(record: Record, work: Work) -> list[str]:
    reasons, limits = [], {"mismatch/kl": MAX_KL, "mismatch/max_abs_logprob_diff": MAX_DIFF}
    if record.get("rollout/age_oldest"):  # of tokens of the version that is updated, if there are
        limits = {names.kl_of_age(0): MAX_KL} if record["rollout/age_newest"] == 0 else {}
    for name, limit in limits.items():
        if _number(record[name]) > limit:
            reasons.append(f"{name} is {record[name]}, more than {limit}")
    if _number(record["replay/coverage"]) != 1:
        reasons.append(f"replay/coverage is {record['replay/coverage']}, not 1")
    if record["rollout/tokens"] != work.responses:
        reasons.append(f"{record['rollout/tokens']} response tokens, not {work.responses}")
    return reasons


def _number(value: float | None) -> float:
    """metrics.jsonl has null for NaN, which is beyond every limit."""
    return math.inf if value is None else value


def summary(records: Sequence[Record], work: Work = USUAL) -> dict[str, Any]:
    """Median seconds of a step and of its stages, and response tokens a second of whole steps.

    `other` is the median of what a step takes beyond its stages."""
    seconds = {s: median(record[f"time/{s}"] for record in records) for s in ("step", *STAGES)}
    seconds["other"] = median(
        record["time/step"] - sum(record[f"time/{stage}"] for stage in STAGES) for record in records
    )
    return {
        "seconds": seconds,
        "slowest_step": max(record["time/step"] for record in records),
        "tokens_per_second": work.responses / seconds["step"],
    }


def measure_trl(
    folder: Path, steps: int, python: str | None, work: Work = USUAL
) -> dict[str, Any] | None:
    """Seconds of the same work in TRL, by what is adapted; None when there is no TRL."""
    if python is None:
        if not importable("trl"):
            return None
        python = sys.executable
    time.sleep(SETTLE_S)
    return {
        name: _run_trl(python, folder, steps, experts, work)
        for name, experts in (("attention", False), ("attention and experts", True))
    }


def _run_trl(python: str, folder: Path, steps: int, experts: bool, work: Work) -> dict[str, Any]:
    asked = {
        "model": str(folder / "model"), "data": str(folder / "prompts.jsonl"), "experts": experts,
        **work._asdict(), "rank": RANK, "alpha": ALPHA,
        "lr": LR, "steps": steps, "warmup": WARMUP, "threads": cores(),
    }  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, trl_step.__file__, json.dumps(asked)]
    busy = busy_cores()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except OSError as error:
        raise BenchmarkError(f"--trl-python={python} cannot be run: {error.strerror}") from error
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise BenchmarkError(f"TRL failed in {python}:\n{last}\nIt is installed by: {TRL_INSTALL}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found["response_tokens"] != [work.tokens]:
        raise BenchmarkError(
            f"TRL's responses had {found['response_tokens']} tokens on average, not {work.tokens}: "
            "it did other work"
        )
    return {
        "seconds": median(found["seconds"]),
        "busy_cores_before": busy,
        "trainable": found["trainable"],
        "versions": found["versions"],
    }


def parts(result: dict[str, Any]) -> Iterator[Any]:
    """What is printed of the figures."""
    yield (
        f"{result['prompts']} prompts x {result['samples_per_prompt']} samples x "
        f"{result['response_tokens']} tokens, {result['parameters']:,} parameters, LoRA rank "
        f"{result['lora_rank']}, {result['cores']} cores{', '.join(['', *result['settings']])}"
    )
    yield table(result)
    if taken := result["cpu_seconds"]:
        by = ", ".join(f"{who} {seconds:.3f}" for who, seconds in taken.items())
        yield f"of a core a step takes {sum(taken.values()):.3f} s: {by}"
    worst = ", ".join(f"{name} {value:.3g}" for name, value in result["worst"].items())
    yield f"at worst: {worst}; the adapter version grew by one a step"
    if result["trl"] is None:
        yield f"TRL is not installed here; to measure it too: {TRL_INSTALL}"


def runs(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each measurement by its name."""
    trl = result["trl"] or {}
    return {"this run": result} | {f"TRL, {name}": run for name, run in trl.items()}


def table(result: dict[str, Any]):
    """Median seconds by stage; TRL's steps and how ours compares."""
    steps, seconds = result["steps"], result["seconds"]
    rows = report.table(["", "seconds", "share"], f"median of {steps} steps")
    for stage in (*STAGES, "other", "step"):
        share = seconds[stage] / seconds["step"]
        rows.add_row(stage, f"{seconds[stage]:.3f}", f"{share:.0%}", end_section=stage == "other")
    rows.add_row("tokens/s", f"{result['tokens_per_second']:,.0f}", "", end_section=True)
    for name, trl in (result["trl"] or {}).items():
        ratio = f"ours / TRL {seconds['step'] / trl['seconds']:.2f}"
        if max(result["busy_cores_before"], trl["busy_cores_before"]) > BUSY:
            ratio = "not comparable"
        rows.add_row(f"TRL, {name}", f"{trl['seconds']:.3f}", ratio)
    return rows
