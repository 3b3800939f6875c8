"""Evaluation with real engines: it is the same each time, changes nothing that is trained, and is
the same again outside the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_run import RECIPE, CliRun
from safetensors.numpy import load_file
from test_run import Finished, run_to_end

from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.telemetry.metrics import read_evaluations, read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = ("trainer.steps=2", "checkpoint.every=1", "logging.samples_per_step=128")
SETS = (
    f"eval.sets.sums.generator={RECIPE}:rows",
    *("eval.sets.sums.limit=24", "eval.sets.sums.samples=4", "eval.sets.sums.answer=text"),
    f"eval.sets.greedy.generator={RECIPE}:rows",
    *("eval.sets.greedy.limit=24", "eval.sets.greedy.temperature=0", "eval.every=1"),
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Finished:
    return run_to_end(tmp_path_factory.mktemp("plain") / "run", RECIPE, *STEPS)


@pytest.fixture(scope="module")
def evaluating(tmp_path_factory) -> Finished:
    return run_to_end(tmp_path_factory.mktemp("evaluating") / "run", RECIPE, *STEPS, *SETS)


def evaluate(folder: Path, *arguments: object) -> Path:
    run = CliRun("eval", *arguments, f"logging.run_dir={folder}", output=folder.with_suffix(".out"))
    try:
        assert run.finish() == 0, run.output
        assert run.leftovers() == []
        return folder
    finally:
        run.end()


def figures(folder: Path, step: int) -> dict[str, float]:
    """An evaluation's metrics without its clock."""
    (found,) = [r for r in read_evaluations(folder / "metrics.jsonl") if r["step"] == step]
    return {name: value for name, value in found.items() if name != "eval/seconds"}


def samples(folder: Path, step: int) -> str:
    return (folder / f"eval/step-{step:06d}.jsonl").read_text()


def test_what_is_trained_is_the_same_to_the_bit_with_and_without(plain, evaluating):
    assert evaluating.samples == plain.samples and len(plain.samples) == 256
    for one, other in zip(
        read_steps(plain.folder / "metrics.jsonl"),
        read_steps(evaluating.folder / "metrics.jsonl"),
        strict=True,
    ):
        for name in ("reward/mean", "loss/policy", "optim/grad_norm", "policy/entropy"):
            assert one[name] == other[name], name
    adapters = (
        load_file(run.folder / "adapter/adapter_model.safetensors") for run in (plain, evaluating)
    )
    one, other = adapters
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


def test_evaluations_are_on_record_before_the_run_and_after_each_step(evaluating):
    records = read_evaluations(evaluating.folder / "metrics.jsonl")
    assert [(r["step"], r["eval/version"]) for r in records] == [(0, 0), (1, 1), (2, 2)]
    assert evaluating.output.count("eval sums after step ") == 3 and evaluating.leftovers == []
    kept = [json.loads(line) for line in samples(evaluating.folder, 2).splitlines()]
    assert len(kept) == 24 * 4 + 24
    mine = [line["reward"] for line in kept if line["set"] == "sums"]
    assert records[2]["eval/sums/avg"] == pytest.approx(sum(mine) / 96, abs=1e-12)
    for line in kept:
        right = str(eval(line["prompt"][:-1]))
        assert line["reward"] == float(line["response"] == right)


def test_the_same_evaluation_outside_the_run_is_equal_also_on_two_engines(evaluating, tmp_path):
    out = evaluate(tmp_path / "again", evaluating.folder, "rollout.engines=2")
    assert samples(out, 2) == samples(evaluating.folder, 2)
    assert figures(out, 2) == figures(evaluating.folder, 2)


def test_a_run_that_ended_before_its_last_evaluation_makes_it_and_no_other(evaluating):
    """As if it had been killed in it."""
    metrics, before = evaluating.folder / "metrics.jsonl", samples(evaluating.folder, 2)
    lines = metrics.read_text().splitlines(keepends=True)
    assert '"eval/step": 2' in lines[-1]
    metrics.write_text("".join(lines[:-1]))
    again = run_to_end(evaluating.folder, evaluating.folder / "config.yaml", "--resume")
    assert samples(again.folder, 2) == before
    assert [r["step"] for r in read_evaluations(metrics)] == [0, 1, 2]
    done = list(read_jsonl(metrics))
    assert {k: v for k, v in done[-1].items() if k != "eval/seconds"} == {
        k: v for k, v in json.loads(lines[-1]).items() if k != "eval/seconds"
    }
