"""What a run measured, and the lag and split that come of it, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.errors import ConfigError, RunDirError
from lora_moe_rl.planner import ahead
from lora_moe_rl.planner.command import main


def test_decoding_is_told_into_what_a_token_costs_and_what_others_cost():
    tokens, at_once = np.array([10.0, 10, 20, 40]), np.array([1.0, 3, 2, 1])
    seconds = tokens * (0.5 + 0.25 * at_once)
    assert ahead.decoding(tokens, seconds, at_once) == pytest.approx((0.5, 0.25))
    # Faster the more there are: no cost of others, and the best of one.
    found = ahead.decoding(np.ones(2), np.array([2.0, 1.0]), np.array([1.0, 2.0]))
    assert found == pytest.approx((1.5, 0.0))


def test_in_flight_is_the_mean_over_a_spans_time_on_its_engine():
    spans = [("a", 0.0, 4.0), ("a", 2.0, 4.0), ("b", 0.0, 4.0), ("a", 5.0, 6.0)]
    assert ahead.in_flight(spans).tolist() == [1.5, 2, 1, 1]


def a_run(folder, steps=4, counts=None, placement="split", key="drawn", **trainer):
    """Two prompts a step, in turns on one engine: 4 tokens in 4 s, whoever else is there; reward
    1 s, update 2 s, publish 1 s, a step 8 s."""
    config = RunConfig(
        algorithm={"prompts_per_step": 2, "group_size": 4},
        trainer={"world_size": 2, "ep": 1, **trainer},
        rollout={"engines": 2},
        placement={"mode": placement},
    )
    (folder / "config.yaml").write_text(to_yaml(config))
    seconds = {"time/rollout": 4, "time/reward": 1, "time/train": 2, "time/refit": 1}
    files: dict[str, list[str]] = {"metrics": [], "order": [], "timeline": []}
    for step in range(1, steps + 1):
        at, rows = 8.0 * step, (2 * step, 2 * step + 1)
        groups = [{key: row, "versions": [step - 1], "longest": 4} for row in rows]
        spans = [[f"engine-{row % 2}", "sample", row, at, 4.0] for row in rows]
        spans += [["rewards", "reward", row, at + 4, 1.0] for row in rows]
        lines = {
            "metrics": {"step": step, "time/step": 8, **seconds, **(counts or {})},
            "order": {"step": step, "version": step - 1, "groups": groups},
            "timeline": {"step": step, "begin": at, "end": at + 8, "spans": spans},
        }
        for name, line in lines.items():
            files[name].append(json.dumps(line) + "\n")
    for name, written in files.items():
        (folder / f"{name}.jsonl").write_text("".join(written))
    return folder


@pytest.mark.parametrize("key", ["drawn", "row"])  # as now, and as an earlier version had it
def test_a_run_is_measured_and_simulated_as_it_went(tmp_path, key):
    measured = ahead.measure(a_run(tmp_path, key=key))
    stages = measured.stages
    assert list(stages.lengths) == [4] * 6  # the first step warms up
    assert (stages.update_s, stages.publish_s, stages.reward_s) == (2, 1, 1)
    assert stages.token_s + stages.sequence_s == pytest.approx(1)
    own = ahead.simulated(measured, lag=0, ranks=2, engines=2)
    assert own.step_s == pytest.approx(measured.step_s) == pytest.approx(8)
    assert own.samples_per_s == pytest.approx(1) and own.slots == 2
    assert (own.idle_trainer, own.idle_engines) == pytest.approx((5 / 8, 4 / 8))


def test_other_splits_have_other_trainers(tmp_path):
    """With one rank for two the update takes 4 s; with lag 1 a group's way is 5 s until it is
    scored and 5 s with the trainer, and there are four slots for two a step."""
    measured = ahead.measure(a_run(tmp_path))
    assert ahead.simulated(measured, lag=1, ranks=1, engines=2).step_s == pytest.approx(5)
    ways = ahead.every_way(measured)
    assert {(way.ranks, way.engines) for way in ways} == {(3, 1), (2, 2), (1, 3)}
    assert {way.lag for way in ways} == {0, 1, 2, 4}


def test_ranks_come_in_the_trainers_layout(tmp_path):
    ways = ahead.every_way(ahead.measure(a_run(tmp_path, ep=2)))
    assert {(way.ranks, way.engines) for way in ways} == {(2, 2)}
    ways = ahead.every_way(ahead.measure(a_run(tmp_path, world_size=6, cp=2, ep=3)))
    assert {(way.ranks, way.engines) for way in ways} == {(6, 2)}  # three are no pairs


@pytest.mark.parametrize(("in_flight", "slots"), [("finish", [2, 3, 6]), ("continue", [2, 2, 2])])
def test_requests_that_are_continued_want_two_slots_at_any_lag(tmp_path, in_flight, slots):
    measured = ahead.measure(a_run(tmp_path))
    asked = measured.config.schedule.model_copy(update={"in_flight": in_flight})
    config = measured.config.model_copy(update={"schedule": asked})
    measured = replace(measured, config=config)
    ways = [ahead.simulated(measured, lag, ranks=2, engines=2) for lag in (0, 1, 4)]
    assert [way.slots for way in ways] == slots


def test_of_ways_that_are_about_as_good_the_one_with_the_least_lag_is_best():
    def way(lag, step_s):
        return ahead.Way(lag, 1, 1, lag + 2, step_s, 1 / step_s, 0, 0)

    ways = [way(0, 2.0), way(1, 1.02), way(2, 1.0), way(4, 1.0)]
    assert ahead.best(ways) is ways[1]
    assert ahead.best([*ways, way(0, 1.01)]).lag == 0
    assert ahead.best([way(0, 2.0), way(4, 1.0)]).lag == 4


def test_the_command_prints_what_was_measured_and_marks_the_best(tmp_path, capsys):
    run = a_run(tmp_path)
    assert main(["--run", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measured"]["step_s"] == 8 and told["simulated"]["step_s"] == pytest.approx(8)
    assert told["best"]["step_s"] <= 1.03 * min(way["step_s"] for way in told["ways"])
    assert main(["--run", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "a step took 8 s" in printed and "+0%" in printed and printed.count("best") == 1


def test_a_run_of_several_turns_is_refused(tmp_path):
    """Its requests are of a turn each, and its responses are of all turns."""
    with pytest.raises(RunDirError, match="several turns"):
        ahead.measure(a_run(tmp_path, counts={"environment/conversations": 8.0}))


def test_a_run_that_takes_turns_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="has placement.mode=colocated"):
        ahead.measure(a_run(tmp_path, placement="colocated"))


def test_a_run_of_one_step_says_too_little(tmp_path):
    with pytest.raises(RunDirError, match="no second step"):
        ahead.measure(a_run(tmp_path, steps=1))
    with pytest.raises(ConfigError, match="plan --run takes no --model"):
        main(["--run", str(tmp_path), "--model", "kimi-k2"])
    with pytest.raises(ConfigError, match="takes no trainer.tp=2"):
        main(["--run", str(tmp_path), "trainer.tp=2"])
    with pytest.raises(ConfigError, match="plan --published takes no --search"):
        main(["--published", "--search"])
