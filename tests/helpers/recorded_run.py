"""A run directory as a run leaves it, written by the project's own writers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import resolve
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import Details, FunctionRewards
from lora_moe_rl.data.update_result import TokenValues
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import SentRoutes, send
from lora_moe_rl.telemetry.metrics import MetricsWriter

LAYERS = (0, 1, 2)
PROMPTS, SAMPLES = 2, 4  # a step's groups, and the samples of each
PLANTED = "<script>window.planted = true</script><img src=x onerror='window.planted = true'>"
MESSAGES = (
    {"role": "assistant", "content": "calling"},
    {"role": "tool", "content": "a tool says 42"},
    {"role": "assistant", "content": PLANTED},
)


def config_in(folder: Path, *settings: str) -> RunConfig:
    every = [f"logging.run_dir={folder}", "logging.samples_per_step=8", "trainer.steps=6"]
    return resolve(override(RunConfig(), [*every, *settings]))


def sample_of(step: int, group: int, index: int) -> Sample:
    """The last sample of a group has two turns with a tool between, and a planted tag."""
    prompt = Segment.given("user", [5, 6])
    first = Segment.sampled([7, 8, 9], np.array([-0.1, -1.5, -0.02], np.float32), step - 1)
    if index < SAMPLES - 1:
        return Sample((prompt, first), "stop", f"response {step}-{group}-{index}")
    segments = (
        prompt,
        first,
        Segment.given("tool", [3, 4]),
        Segment.sampled([2], np.zeros(1), step),
    )
    return Sample(segments, "length", PLANTED, messages=MESSAGES)


def groups_of(step: int) -> list[Group]:
    """Rewards are 0, 1/4, 2/4 and 3/4, from two functions."""
    groups = []
    for i in range(PROMPTS):
        rewards = np.arange(SAMPLES, dtype=np.float32) / SAMPLES
        details = Details(
            by_function={
                "right": FunctionRewards(1.0, rewards),
                "short": FunctionRewards(0.5, rewards),
            }
        )
        samples = [sample_of(step, i, k) for k in range(SAMPLES)]
        prompt = Prompt(number=step * PROMPTS + i, text=f"What is {i} + {step}?", token_ids=[5, 6])
        groups.append(Group(prompt, samples, None, rewards, details=details))
    return groups


def experts_of(row: int) -> list[list[int]]:
    """Of the token in this row of a sample, in each of LAYERS."""
    return [[(row + layer) % 8, (row + layer + 1) % 8] for layer in LAYERS]


def routes_of(group: Group) -> SentRoutes:
    lengths = [len(sample.token_ids) - 1 for sample in group.samples]
    rows = [np.array([experts_of(row) for row in range(length)]) for length in lengths]
    return send(RouteTable.build(rows, lengths, LAYERS, 8, 2))


def values_of(groups: list[Group]) -> dict[int, TokenValues]:
    """The trainer is 2e-7 below the engine at the first token, and as much above it at the third;
    the entropy falls from token to token."""
    samples = [sample for group in groups for sample in group.samples]
    found = {}
    for number, sample in enumerate(samples):
        logprobs = sample.logprobs.astype(np.float64)
        logprobs[0] -= 2**-22
        logprobs[2] += 2**-22
        entropy = 1 / (1 + np.arange(len(logprobs)))
        found[number] = TokenValues(logprobs.astype(np.float32), entropy.astype(np.float32))
    return found


def metrics_of(step: int) -> dict[str, float]:
    disagreement = {
        f"replay/disagreement/layer_{layer:02d}": step * layer / 100 for layer in LAYERS
    }
    return {
        "step": step,
        "reward/mean": step / 10,
        "mismatch/kl": 10.0**-step,
        "time/step": 1.5,
        "time/rollout": 1.0,
        **disagreement,
    }


def loads_of(step: int) -> np.ndarray:
    """How often each of 8 experts was chosen, in LAYERS: the last expert most."""
    return np.arange(8) * (1 + np.array(LAYERS)[:, None]) + step


def timeline_of(step: int) -> dict:
    begin = 1000.0 + step
    spans = [
        ["trainer", "wait: scored groups", 0, begin, 0.5],
        ["engine-0", "sample", step, begin, 0.4],
        ["rewards", "reward", step, begin + 0.4, 0.1],
        ["trainer", "update", step, begin + 0.5, 0.3],
        ["publish", "publish", step, begin + 0.8, 0.2],
    ]
    return {"step": step, "begin": begin, "end": begin + 1, "spans": spans}


def record(
    folder: Path, steps: range = range(1, 7), resume: bool = False, *settings: str
) -> RunDir:
    """Writes steps of a run into `folder`, each as `run/records.py` does."""
    config = config_in(folder, *settings)
    with RunDir(config, resume) as run_dir, MetricsWriter(run_dir, config) as metrics:
        for step in steps:
            groups = groups_of(step)
            signals = [Signal.of_samples(one, one.rewards - one.rewards.mean()) for one in groups]
            for group in groups if config.logging.routes else ():
                group.routes = routes_of(group)
            run_dir.write_order(step, step - 1, groups)
            values = values_of(groups) if config.logging.tokens else None
            run_dir.write_samples(step, groups, signals, values=values)
            run_dir.write_timeline(timeline_of(step))
            run_dir.write_routes(step, LAYERS, loads_of(step))
            metrics.write(metrics_of(step))
    return run_dir
