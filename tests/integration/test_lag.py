"""A whole run that samples ahead of its training, with real engines, stopped and resumed."""

from __future__ import annotations

import shutil

import pytest
from cli_run import RECIPE, trained
from test_evaluation import evaluate, samples

from lora_moe_rl.bench.asynchronous import LONG, measure, run_dir, write_rows
from lora_moe_rl.files.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PROMPTS = 5, 16
SETTINGS = (
    *(
        f"trainer.steps={STEPS}",
        "checkpoint.every=2",
        "checkpoint.keep=3",
        "logging.samples_per_step=128",
    ),
    *("schedule.lag=1", "refit.slots=3", "algorithm.correction=tis"),
)


def trained_rows(folder) -> dict[int, set[int]]:
    """`{step: rows of its prompts}`."""
    found: dict[int, set[int]] = {}
    for sample in read_jsonl(folder / "samples.jsonl"):
        found.setdefault(sample["step"], set()).add(sample["drawn"])
    return found


@pytest.mark.whole
def test_every_prompt_is_trained_once_at_the_age_that_lag_allows(tmp_path):
    folder, copy = tmp_path / "run", tmp_path / "resumed"
    records = trained(folder, RECIPE, *SETTINGS)
    assert [r["rollout/age_oldest"] for r in records] == [0, 1, 1, 1, 1]
    assert [r["rollout/age_newest"] for r in records] == [0, 1, 1, 1, 1]
    assert records[0]["mismatch/kl_age_0"] <= 1e-6
    for record in records[1:]:
        # Another version: further off than rounding, and not far.
        assert 1e-6 < record["mismatch/kl_age_1"] < 0.1 and record["mismatch/kl_age_0"] is None
        assert record["replay/coverage"] == 1 and record["refit/max_diff"] <= 1e-4
        assert 0.5 < record["loss/weight"] < 2 and record["loss/weight_ess"] < 1
    for sample in read_jsonl(folder / "samples.jsonl"):
        assert set(sample["versions"]) == {max(0, sample["step"] - 2)}

    shutil.copytree(folder, copy)
    for checkpoint in ("step-000004", "step-000005"):
        shutil.rmtree(copy / "checkpoints" / checkpoint, ignore_errors=True)
    resumed = trained(copy, folder / "config.yaml", "--resume")
    assert [r["step"] for r in resumed] == list(range(1, STEPS + 1))
    assert resumed[2]["rollout/age_oldest"] == 0  # the engines start anew, with nothing under way
    for rows in (trained_rows(folder), trained_rows(copy)):
        assert sorted(row for step in rows.values() for row in step) == list(range(STEPS * PROMPTS))


@pytest.mark.parametrize("continued", ["join", "split"])
def test_requests_go_on_under_newer_versions_and_an_evaluation_beside_them_does_not(
    tmp_path, continued
):
    """The evaluation of a version is the same made alone, of its checkpoint."""
    held = tmp_path / "held.jsonl"
    write_rows(held, LONG, 16)
    settings = [
        *("schedule.in_flight=continue", f"schedule.continued={continued}", "refit.slots=5"),
        *(f"eval.sets.held.path={held}", "eval.sets.held.samples=2", "eval.every=2"),
        *("checkpoint.every=2", "checkpoint.keep=9"),
    ]
    records = measure(tmp_path, "mixed", 2, 2, settings)
    assert sum(record["rollout/continued"] for record in records) > 0
    assert any(record["rollout/spans_mean"] > 1 for record in records)
    assert (sum(record["rollout/fed_again"] for record in records) > 0) == (continued == "split")
    folder = run_dir(tmp_path, "mixed", 2)
    for step in (2, 6):
        out = evaluate(tmp_path / f"again-{step}", folder / f"checkpoints/step-{step:06d}")
        assert samples(out, step) == samples(folder, step)
