"""Whole runs that learn from the rows' own answers: without engines, resumed, exported, and as a
warm start for reinforcement learning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import mean

import pytest
from cli_run import RECIPE, ROOT, CliRun
from safetensors.numpy import load_file

from lora_moe_rl.cli import main
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model

pytestmark = pytest.mark.timeout(900)

SFT = ROOT / "recipes/tiny_sft.py"
DYING_SFT = Path(__file__).parent / "dying_sft.py"
STEPS, TRACED = 12, 3
HELD = (f"eval.sets.sums.generator={SFT}:rows", "eval.sets.sums.limit=90", "eval.every=4")
HELD += ("checkpoint.best_metric=eval/sums/nll", "checkpoint.best_is=smallest")
HELD += ("checkpoint.keep_best=1",)
CLOCKS = ("eval/seconds", "time/", "idle/", "perf/", "memory/", "data/tokens_per_second")
CLOCKS += ("checkpoint/",)  # one that was stopped has a checkpoint of that step


@dataclass
class Finished:
    folder: Path
    output: str

    @property
    def lines(self) -> list[dict]:
        return list(read_jsonl(self.folder / "metrics.jsonl"))

    @property
    def records(self) -> list[dict]:
        return [line for line in self.lines if "eval/step" not in line]

    @property
    def evaluations(self) -> list[dict]:
        return [line for line in self.lines if "eval/step" in line]


def exit_code(output: Path, *arguments: object) -> int:
    """Of a process of its own: a run ends the Ray of its process, which other tests have too."""
    run = CliRun(*arguments, output=output)
    try:
        return run.finish()
    finally:
        run.end()


def run_to_end(folder: Path, *arguments: object) -> Finished:
    run = CliRun(
        "train", *arguments, f"logging.run_dir={folder}", output=folder.with_suffix(".out")
    )
    try:
        assert run.finish() == 0, run.output
        assert run.leftovers() == []
        return Finished(folder, run.output)
    finally:
        run.end()


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Iterator[Finished]:
    resolve_model("qwen3_moe")
    folder = tmp_path_factory.mktemp("warm") / "run"
    steps = (f"trainer.steps={STEPS}", "checkpoint.every=6", f"logging.profile={TRACED}")
    yield run_to_end(folder, SFT, *steps, *HELD)


@pytest.mark.minute
def test_the_loss_falls_and_no_engine_has_started(warm):
    losses = [record["loss/nll"] for record in warm.records]
    first, last = mean(losses[:2]), mean(losses[-4:])  # a step's 64 rows alone are off by a fourth
    assert len(losses) == STEPS and last < 0.7 * first, losses
    assert [record["adapter/version"] for record in warm.records] == list(range(STEPS))
    assert "no engines: algorithm=sft learns from the rows' own answers" in warm.output
    assert "engine-0" not in warm.output and "vllm" not in warm.output.lower()
    logs = {path.name for path in (warm.folder / "logs").iterdir()}
    assert {log for log in logs if not log.endswith(".libraries.log")} == {
        "controller.log",
        "trainer-0.log",
        "trainer-1.log",
    }
    assert "Traceback" not in warm.output and "WARNING" not in warm.output
    assert (warm.folder / "curves.png").stat().st_size > 10_000


def test_held_out_rows_are_judged_before_during_and_after(warm, tmp_path):
    """Outside the run too, to the same figures."""
    found = warm.evaluations
    assert [one["eval/step"] for one in found] == [0, 4, 8, 12]
    assert [one["eval/version"] for one in found] == [0, 4, 8, 12]
    losses = [one["eval/sums/nll"] for one in found]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]
    for one in found:
        assert one["eval/sums/perplexity"] == pytest.approx(exp(one["eval/sums/nll"]), rel=1e-12)
        assert one["eval/sums/prompts"] == 90 and 2 <= one["eval/sums/response_length"] <= 4
        assert f"eval sums after step {one['step']}: 90 rows, nll " in warm.output
    kept = json.loads((warm.folder / "checkpoints/kept.json").read_text())
    # The last evaluation comes after the last checkpoint.
    assert kept == {"step-000012": f"best: eval/sums/nll {losses[-1]:.6g}"}
    outside = f"logging.run_dir={tmp_path}/outside"
    assert exit_code(tmp_path / "eval.out", "eval", warm.folder, outside) == 0
    (again,) = read_jsonl(tmp_path / "outside/metrics.jsonl")
    assert again["eval/sums/nll"] == losses[-1] and again["eval/step"] == STEPS


def test_every_rank_has_a_trace_of_the_chosen_step_and_of_no_other(warm):
    """The run that goes on from its middle has none, and the same numbers."""
    names = {path.name for path in (warm.folder / "traces").iterdir()}
    assert names == {f"trainer-{rank}-step-{TRACED}.json" for rank in range(2)}
    for name in names:
        events = json.loads((warm.folder / "traces" / name).read_text())["traceEvents"]
        ops = [event for event in events if event.get("cat") == "cpu_op"]
        named = {op["name"] for op in ops}
        assert {"aten::embedding", "aten::mm"} <= named, named
        assert any("Backward" in name for name in named)
        assert any("Input Dims" in op["args"] for op in ops)


def test_a_run_that_goes_on_equals_one_that_was_not_stopped(warm, tmp_path):
    """To the last bit, from the checkpoint in its middle."""
    folder = tmp_path / "run"
    shutil.copytree(warm.folder, folder)
    shutil.rmtree(folder / f"checkpoints/step-{STEPS:06d}")
    resumed = run_to_end(folder, folder / "config.yaml", "--resume")
    assert f"going on from {folder}/checkpoints/step-000006" in resumed.output
    for ours, theirs in zip(resumed.lines, warm.lines, strict=True):
        assert {k: v for k, v in ours.items() if not k.startswith(CLOCKS)} == {
            k: v for k, v in theirs.items() if not k.startswith(CLOCKS)
        }
    adapters = [
        load_file(one / "adapter/adapter_model.safetensors") for one in (folder, warm.folder)
    ]
    assert all((adapters[0][name] == adapters[1][name]).all() for name in adapters[1])


def test_the_adapter_is_exported_as_that_of_any_run(warm, tmp_path):
    out = tmp_path / "adapter"
    assert main(["export", str(warm.folder), "--to", "peft", "--out", str(out)]) == 0
    ours = load_file(warm.folder / "adapter/adapter_model.safetensors")
    exported = load_file(out / "adapter_model.safetensors")
    assert exported.keys() == ours.keys() and len(ours) > 50
    assert all((exported[name] == ours[name]).all() for name in ours)
    assert json.loads((out / "adapter_config.json").read_text())["peft_type"] == "LORA"


@pytest.mark.slow
def test_reinforcement_learning_goes_on_from_it(warm, tmp_path):
    """The model begins with about a third of its answers right; after the answers were shown it
    begins higher, in an engine that was given the adapter."""
    start = f"adapter.init_from={warm.folder}"
    rl = run_to_end(tmp_path / "run", RECIPE, "trainer.steps=2", start)
    assert f"starting from {warm.folder}: 28 sites" in rl.output
    first = rl.records[0]
    assert first["reward/mean"] > 0.45 and first["mismatch/kl"] < 1e-6, first
    assert first["replay/coverage"] == 1 and rl.records[1]["adapter/version"] == 1


@pytest.mark.slow
def test_a_weight_that_follows_the_kl_is_the_same_after_a_resume(warm, tmp_path):
    """A KL to the start that is 0 in the first step, below the target, then above it."""
    given = ("algorithm.kl_coef=0.1", "algorithm.kl_target=1e-7", "algorithm.kl_horizon=1024")
    steps = ("trainer.steps=4", "checkpoint.every=2", f"adapter.init_from={warm.folder}")
    folder, config = tmp_path / "run", load_config(str(RECIPE))
    whole = run_to_end(folder, RECIPE, *given, *steps, "algorithm.reference=start")
    coefs = [record["loss/kl_coef"] for record in whole.records]
    step = config.algorithm.prompts_per_step * config.algorithm.group_size / 1024
    assert coefs[:2] == [0.1, pytest.approx(0.1 * (1 - 0.2 * step), rel=1e-12)]
    assert coefs[1] < coefs[2] < coefs[3]
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "checkpoints/step-000004")
    resumed = run_to_end(again, again / "config.yaml", "--resume")
    assert f"kl_coef goes on at {coefs[2]:.4g}: algorithm.kl_coef=0.1" in resumed.output
    assert [record["loss/kl_coef"] for record in resumed.records] == coefs
    kls = [[record["loss/kl"] for record in one.records] for one in (whole, resumed)]
    assert kls[0] == kls[1]


@pytest.mark.slow
def test_reinforcement_learning_is_held_near_it_while_samples_are_ahead(warm, tmp_path):
    """With routes that are replayed, and samples of an older version."""
    to_start = ("algorithm.kl_coef=0.1", "algorithm.reference=start", "algorithm.correction=tis")
    ahead = ("schedule.lag=1", "refit.slots=3", "trainer.steps=3", "checkpoint.every=0")
    start = f"adapter.init_from={warm.folder}"
    rl = run_to_end(tmp_path / "run", RECIPE, start, *to_start, *ahead)
    first, *others = rl.records
    assert first["reference/kl"] == first["loss/kl"] == 0
    for record in others:
        assert record["reference/kl"] == pytest.approx(record["loss/kl"], rel=1e-4) and (
            record["loss/kl"] > 1e-9
        )
        assert record["replay/coverage"] == 1
    assert "WARNING" not in rl.output


def pairs(folder: Path) -> tuple[str, ...]:
    """Settings of a run that learns from pairs, which are in a file then."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
        for a in range(20)
        for b in range(10)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        *("algorithm=dpo", "algorithm.prompts_per_step=64", "data.generator=null"),
        f"data.path={folder}/pairs.jsonl",
    )


@pytest.mark.slow
def test_pairs_are_measured_against_the_start_also_when_ranks_die_and_the_run_goes_on(
    warm, tmp_path, monkeypatch
):
    """The loss begins at log 2 again, after 12 steps of sft. Ranks die in step 2; what goes on from
    that step's checkpoint, with the start at another place, equals what was not stopped; another
    start, or none, is refused."""
    start = tmp_path / "start"
    shutil.copytree(warm.folder / "adapter", start)
    settings = (*pairs(tmp_path), f"adapter.init_from={start}", "algorithm.reference=start")
    steps = ("trainer.steps=4", "checkpoint.every=2")
    whole = run_to_end(tmp_path / "whole", SFT, *settings, *steps)
    first, second, *_ = whole.records
    assert first["reference/kl"] == first["reference/moved"] == 0
    assert first["loss/dpo"] == pytest.approx(0.693147, abs=1e-6)
    assert second["reference/kl"] > 0 and second["reference/moved"] > 0
    assert "WARNING" not in whole.output
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("MARKS", str(marks))
    healed = run_to_end(tmp_path / "healed", DYING_SFT, *settings, *steps)
    assert (marks / "died-in-step-2").exists()
    assert [record["trainer/restarts"] for record in healed.records] == [0, 1, 1, 1]
    monkeypatch.delenv("MARKS")
    moved = tmp_path / "moved"
    start.rename(moved)
    shutil.rmtree(tmp_path / "healed/checkpoints/step-000004")
    again = ("train", str(tmp_path / "healed/config.yaml"), "--resume")
    assert exit_code(tmp_path / "missing.out", *again) == 2
    shutil.copytree(tmp_path / "whole/adapter", start)
    assert exit_code(tmp_path / "another.out", *again) == 2
    resumed = run_to_end(tmp_path / "healed", *again[1:], f"adapter.init_from={moved}")
    for ours, theirs in zip(resumed.records, whole.records, strict=True):
        for name in ("loss/dpo", "reference/kl", "reference/moved", "rewards/margins"):
            assert ours[name] == theirs[name], name


@pytest.mark.slow
def test_pairs_are_learned_from_in_a_whole_run(tmp_path):
    resolve_model("qwen3_moe")
    run = run_to_end(tmp_path / "run", SFT, *pairs(tmp_path), "trainer.steps=8")
    first, last = run.records[0], run.records[-1]
    assert first["loss/dpo"] == pytest.approx(0.6931, abs=1e-3) and last["loss/dpo"] < 0.65
    assert last["rewards/margins"] > 0.05 and last["rewards/accuracies"] > 0.7
    assert "no engines: algorithm=dpo" in run.output and "right" in run.output
