"""When a run ends because its metric gets no better."""

from __future__ import annotations

import math

import pytest

from lora_moe_rl.config import CheckpointConfig, RunConfig
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.run.plateau import Look, looks, of_run, plateau, text


def of(*values: float) -> list[Look]:
    return [Look(step, value) for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("values", "patience", "best"),
    [
        ([], 1, None),
        ([0.5], 1, None),
        ([0.5, 0.5], 1, 1),  # as good is not better
        ([0.5, 0.6], 1, None),
        ([0.1, 0.9, 0.8, 0.7], 2, 2),
        ([0.1, 0.9, 0.8, 0.95], 2, None),
        ([0.1, 0.9, 0.8, 0.7, 0.6, 0.8], 3, 2),
        ([0.1, 0.9, 0.8], 2, None),
    ],
)
def test_a_plateau_is_so_many_looks_in_a_row_that_are_no_better_than_the_best(
    values, patience, best
):
    ended = plateau(of(*values), patience, largest=True)
    assert (None if ended is None else ended.best.step) == best
    mirrored = plateau(of(*(-value for value in values)), patience, largest=False)
    assert (mirrored is None) == (ended is None)
    if ended is not None:
        assert ended.since == len(values) - ended.best.step >= patience


def test_a_look_is_the_mean_since_the_checkpoint_before_and_nothing_beyond_the_last_step_counts():
    values = {1: 1.0, 2: 3.0, 4: 5.0, 7: 9.0}
    assert looks(values, every=2, done=6) == [Look(2, 2.0), Look(4, 5.0)]
    assert looks(values, every=2, done=5) == [Look(2, 2.0), Look(4, 5.0)]
    assert looks(values, every=2, done=8)[-1] == Look(8, 9.0)


def test_of_evaluations_each_is_a_look_in_the_order_of_steps():
    values = {20: 0.3, 0: 0.1, 40: math.nan, 30: 0.2}
    assert looks(values, every=0, done=30) == [Look(0, 0.1), Look(20, 0.3), Look(30, 0.2)]
    assert [look.step for look in looks(values, every=0, done=40)] == [0, 20, 30]


def test_a_run_counts_by_what_its_metric_is():
    values = {0: 0.5, 2: 0.4, 4: 0.3}
    config = CheckpointConfig(every=10, stop_after=2, best_metric="eval/sums/avg")
    assert of_run(config, values, 4) == plateau(of_run_looks(values), 2, largest=True)
    assert of_run(config, values, 2) is None
    steps = config.model_copy(update={"best_metric": "reward/mean"})
    assert of_run(steps, values, 4) is None  # no checkpoint yet
    off = config.model_copy(update={"stop_after": 0})
    assert of_run(off, values, 4) is None


def of_run_looks(values: dict[int, float]) -> list[Look]:
    return [Look(step, value) for step, value in values.items()]


def test_the_message_says_why_what_was_best_and_the_way_on():
    config = CheckpointConfig(every=2, stop_after=2, best_metric="reward/mean")
    ended = of_run(config, {step: 1 / step for step in range(1, 7)}, 6)
    assert ended is not None
    assert text(config, ended) == (
        "the last 2 checkpoints found reward/mean no better than 0.75 over 2 steps, its best, at "
        "step 2 (checkpoint.stop_after=2); to go on: --resume with checkpoint.stop_after above 2, "
        "or 0"
    )


def test_it_needs_a_metric_and_looks():
    with pytest.raises(ValueError, match="stop_after=2 needs a metric .* checkpoint.best_metric"):
        CheckpointConfig(stop_after=2)
    with pytest.raises(ValueError, match="checkpoint.every=0 makes one at the end alone"):
        CheckpointConfig(stop_after=2, best_metric="reward/mean", every=0)


@pytest.mark.parametrize(
    ("checkpoint", "evaluation", "match"),
    [
        ({"keep_best": 1}, {}, "best_metric=eval/sums/avg is of no set of eval.sets .none."),
        ({"keep_best": 1}, {"sets": {"other": {"path": "a"}}}, "name one of them, as eval/other/"),
        ({"stop_after": 1}, {"sets": {"sums": {"path": "a"}}}, "eval.every=0 evaluates before"),
    ],
)
def test_a_metric_of_evaluations_needs_its_set_and_evaluations(checkpoint, evaluation, match):
    checkpoint = {"best_metric": "eval/sums/avg", **checkpoint}
    config = RunConfig.model_validate({"checkpoint": checkpoint, "eval": evaluation})
    with pytest.raises(ConfigError, match=match):
        check_applicable(config)


def test_with_its_set_and_evaluations_it_is_accepted():
    checkpoint = {"best_metric": "eval/sums/avg", "stop_after": 1, "every": 0}
    evaluation = {"sets": {"sums": {"path": "a"}}, "every": 5}
    check_applicable(RunConfig.model_validate({"checkpoint": checkpoint, "eval": evaluation}))
