"""Which checkpoints stay: the newest whatever happens, the young, and the best by a metric."""

from __future__ import annotations

import json
import math
import os
import time

import pytest
from checkpoints import write_checkpoint

from lora_moe_rl.config import CheckpointConfig, RunConfig
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.checkpoint import MANIFEST
from lora_moe_rl.files.checkpoint_writing import KEPT, prune
from lora_moe_rl.files.retention import Metric, Retention, best_of, mean_up_to


def steps_left(root) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def run_of(folder, rewards, said=None, hours=None, **settings) -> list[int]:
    """Steps of the checkpoints that are there after a run with these rewards, one a step. `hours`:
    {step: how old its checkpoint is made, once it is there}."""
    hours = hours or {}
    config = CheckpointConfig(every=1, **settings)
    metrics = folder / "metrics.jsonl"
    retention = Retention(config, metrics, (said if said is not None else []).append)
    root = folder / "checkpoints"
    for step, reward in enumerate(rewards, start=1):
        with open(metrics, "a") as file:
            file.write(json.dumps({"step": step, "reward/mean": reward}) + "\n")
        with write_checkpoint(root, step, config.keep, {}, also=retention):
            pass
        for path in root.glob("step-*"):
            then = time.time() - 3600 * hours.get(int(path.name[5:]), 0)
            os.utime(path / MANIFEST, (then, then))
    return steps_left(root)


def test_the_best_stay_beside_the_newest(tmp_path):
    rewards = [0.1, 0.9, 0.3, 0.8, 0.2, 0.1]
    kept = run_of(tmp_path, rewards, keep_best=2, best_metric="reward/mean")
    assert kept == [2, 4, 5, 6]
    why = json.loads((tmp_path / "checkpoints" / KEPT).read_text())
    assert why == {"step-000002": "best: reward/mean 0.9", "step-000004": "best: reward/mean 0.8"}
    prune(tmp_path / "checkpoints", 6, keep=2)  # of a run that goes on without these settings
    assert steps_left(tmp_path / "checkpoints") == [5, 6]
    assert not (tmp_path / "checkpoints" / KEPT).exists()


def test_the_smallest_may_be_the_best(tmp_path):
    settings = {"keep_best": 1, "best_metric": "reward/mean", "best_is": "smallest"}
    assert run_of(tmp_path, [0.1, 0.9, 0.3, 0.8], **settings) == [1, 3, 4]


def test_nan_is_never_the_best(tmp_path):
    assert run_of(tmp_path, [None, 0.5, 0.1, 0.1], keep_best=1, best_metric="reward/mean") == [
        2, 3, 4,
    ]  # fmt: skip


def test_without_rules_the_newest_alone_stay(tmp_path):
    assert run_of(tmp_path, [0.9, 0.1, 0.1, 0.1]) == [3, 4]
    assert not (tmp_path / "checkpoints" / KEPT).exists()


def test_the_young_stay_and_the_newest_however_old_they_are(tmp_path):
    assert run_of(tmp_path, [0] * 5, hours={1: 3, 2: 1, 3: 1}, keep_hours=2) == [2, 3, 4, 5]
    (tmp_path / "old").mkdir()
    old = dict.fromkeys(range(1, 6), 9)
    assert run_of(tmp_path / "old", [0] * 5, hours=old, keep_hours=2) == [4, 5]


def test_a_metric_that_is_nowhere_is_said_with_the_one_that_was_meant(tmp_path):
    said: list[str] = []
    wrong = {"best_metric": "reward/meen", "best_is": "largest"}
    run_of(tmp_path, [0.5, 0.6], said, keep_best=1, **wrong)
    assert len(said) == 2 and "did you mean reward/mean?" in said[0]


def test_an_evaluation_is_of_its_own_step_alone(tmp_path):
    """Every 5 steps, with a checkpoint every 10: what was good at step 15 is in no checkpoint."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "eval/sums/avg": value}) + "\n"
            for step, value in {5: 0.1, 10: 0.5, 15: 0.9, 20: 0.4, 25: 0.9}.items()
        )
    )
    settings = CheckpointConfig(every=10, keep_best=1, best_metric="eval/sums/avg")
    judge = Retention(settings, tmp_path / "metrics.jsonl", print)
    paths = [tmp_path / f"step-{step:06d}" for step in (10, 20, 30)]
    assert judge(paths) == {paths[0]: "best: eval/sums/avg 0.5"}


@pytest.mark.parametrize(
    ("metric", "best_is", "kept"),
    [
        ("loss/nll", None, 2),
        ("reward/mean", None, 1),
        ("eval/a/nll", None, 2),
        ("loss/nll", "largest", 1),
    ],
)
def test_which_value_is_the_best_the_table_of_metrics_says(metric, best_is, kept, tmp_path):
    lines = [{"step": 1, metric: 0.9}, {"step": 2, metric: 0.1}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = CheckpointConfig(every=1, keep_best=1, best_metric=metric, best_is=best_is)
    judge = Retention(settings, tmp_path / "m.jsonl", print)
    paths = [tmp_path / f"step-{step:06d}" for step in (1, 2)]
    assert list(judge(paths)) == [paths[kept - 1]]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("reward/meen", "does not say which value is better; set checkpoint.best_is=largest"),
        ("loss/policy", "does not say which value is better"),
        ("rewards/mean", "is no metric that a run logs; did you mean reward/mean?"),
    ],
)
def test_a_metric_of_which_nobody_says_what_is_best_is_refused(metric, said):
    for settings in ({"keep_best": 1}, {"stop_after": 2}):
        config = RunConfig(checkpoint={"best_metric": metric, **settings})
        with pytest.raises(ConfigError, match=f"checkpoint.best_metric={metric}.*{said}"):
            check_applicable(config)


def test_the_mean_is_of_the_steps_since_the_checkpoint_before():
    values = {1: 8.0, 2: 1.0, 3: 3.0, 5: 7.0}
    assert mean_up_to(values, 3, 2) == 2.0
    assert mean_up_to(values, 5, 2) == 7.0  # step 4 has no value
    assert math.isnan(mean_up_to(values, 9, 2))


def test_of_equal_ones_the_newer_is_kept():
    assert best_of({1: 0.5, 2: 0.5, 3: 0.1}, 1, largest=True) == [2]
    assert best_of({1: 0.5, 2: 0.5, 3: 0.1}, 2, largest=False) == [3, 2]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metric = Metric(path, "a")
    assert metric.read() == {}
    path.write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a"')
    assert metric.read() == {1: 2.0}
    path.write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a": 3.0}\n')
    assert metric.read() == {1: 2.0, 2: 3.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"best_metric": "reward/mean"},
        {"best_is": "smallest"},
        {"push_retries": 1},
        {"push_timeout_s": 1},
    ],
)
def test_a_setting_without_what_it_belongs_to_is_refused(settings):
    with pytest.raises(ConfigError, match="has no effect"):
        check_applicable(RunConfig(checkpoint=settings))


def test_the_best_needs_a_metric():
    with pytest.raises(ValueError, match="checkpoint.best_metric"):
        CheckpointConfig(keep_best=1)
    for few in ({"keep_best": 2, "best_metric": "reward/mean"}, {"keep_hours": 1.5}):
        with pytest.raises(ValueError, match="checkpoint.every=0 makes one at the end alone"):
            CheckpointConfig(every=0, **few)
