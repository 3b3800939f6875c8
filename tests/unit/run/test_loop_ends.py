"""What ends the loop, and what it leaves behind."""

from __future__ import annotations

import asyncio

import pytest
from faulty_ports import OTHER, FaultyEngines
from loop_run import (
    CONFIG,
    Engines,
    Environment,
    Evaluator,
    Records,
    Source,
    evaluating,
    of_steps,
    run,
)

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ActorFailed, EngineLost, MismatchError, RefitError, RewardError


def test_groups_with_failed_rewards_are_not_drawn_again_and_stop_the_run_as_always():
    """One of two rewards has failed, which leaves nothing to compare, and is no equal reward."""
    algorithm = CONFIG.algorithm.model_copy(update={"draw_again": 1})
    config = CONFIG.model_copy(update={"algorithm": algorithm})
    made = run(failed=3, equal=range(1), config=config)
    assert made.error is None and made.records.again == 0
    rows = [[group.prompt.number for group in facts.groups] for facts in made.records.steps]
    assert rows == [[0, 1], [2, 3]]
    made = run(failed=99, unrewarded=1, config=config)
    assert isinstance(made.error, RewardError) and made.records.again == 0
    assert made.records.kept == [(1, [0, 1])]


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_without_a_signal_end_the_run_after_a_checkpoint_of_all_that_was_trained(lag):
    """The first two prompts make a step, and no others. With lag 1 the limit is reached while that
    step is trained, which is not broken off. A run that goes on draws no prompt twice that had no
    signal."""
    algorithm = CONFIG.algorithm.model_copy(update={"draw_again": 2})
    settings = CONFIG.model_copy(update={"algorithm": algorithm}).model_dump(exclude_unset=True)
    config = RunConfig.model_validate(settings | {"schedule": {"lag": lag}})
    made = run(lag=lag, equal=range(2, 99), config=config, due=())
    assert isinstance(made.error, RewardError) and str(made.error).endswith("(5)")  # the first
    assert len(made.records.steps) == len(made.trainer.batches) == 1
    assert made.events[-3:] == ["checkpoint 1", "written 1", "finish"]
    (book,) = made.records.books
    seen = book["data"]["drawn"]
    again = {*range(seen, 99)} - {*book["done"]}
    assert not again & {*range(7)}  # 0 and 1 were trained, 2 to 6 had no signal


@pytest.mark.parametrize(("lag", "row"), [(0, 2), (1, 4)])
def test_an_algorithm_that_fails_over_a_group_lets_the_update_end(lag, row, monkeypatch):
    """It may be one's own, and ends the run as an environment does that fails."""
    own = PolicyGradient.has_signal

    def fails(self, group):
        if group.prompt.number == row:
            raise RewardError("states of 2 turns")
        return own(self, group)

    monkeypatch.setattr(PolicyGradient, "has_signal", fails)
    settings = {"algorithm": {"draw_again": 2, "anchor": "rollout"}, "schedule": {"lag": lag}}
    settings |= {"refit": {"slots": 3}, "trainer": {"steps": 3}}
    made = run(lag=lag, config=with_settings(CONFIG, settings), due=())
    assert str(made.error) == "states of 2 turns" and made.trainer.batches
    step = len(made.trainer.batches)
    assert made.events[-3:] == [f"checkpoint {step}", f"written {step}", "finish"]


def test_prompts_without_a_signal_before_the_first_step_leave_no_checkpoint():
    algorithm = CONFIG.algorithm.model_copy(update={"draw_again": 2})
    made = run(equal=range(99), config=CONFIG.model_copy(update={"algorithm": algorithm}))
    assert isinstance(made.error, RewardError) and made.records.steps == []
    assert made.records.books == [] and made.events[-1] == "finish"


@pytest.mark.parametrize("served", [None, 0, OTHER])
def test_a_failed_proof_stops_the_run_before_the_step_is_on_record(served):
    engines = Engines(serves={0: lambda version: served if version == 2 else version})
    made = run(engines)
    assert isinstance(made.error, RefitError) and len(made.records.steps) == 1
    assert engines.rolled_back == [(2, ["parts of 2"])]


def test_an_update_that_is_refused_is_not_published():
    made = run(refuses=2)
    assert isinstance(made.error, MismatchError) and len(made.records.steps) == 1
    assert {version for _, version in made.engines.scored} == {None, 0, 1}


def test_a_step_whose_rewards_stop_the_run_is_kept_and_drawn_again():
    made = run(unrewarded=2)
    assert isinstance(made.error, RewardError) and len(made.records.steps) == 1
    assert made.records.kept == [(2, [2, 3])]
    (book,) = made.records.books
    assert book["data"] == {"drawn": 2}
    assert made.events[-3:] == ["checkpoint 1", "written 1", "finish"]


@pytest.mark.parametrize(("lag", "at"), [(0, 1), (1, 2)])
def test_an_evaluation_whose_rewards_fail_ends_the_run_with_a_checkpoint_of_its_step(lag, at):
    """With a lag that of the step that is trained beside it. A checkpoint that is due is not
    written twice."""
    config = evaluating(lag)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 3})})
    for due in ((), (at,)):
        made = run(lag=lag, config=config, unevaluated=1, due=due)
        assert isinstance(made.error, RewardError) and len(made.records.steps) == at
        checkpoints = [event for event in made.events if event.startswith("checkpoint")]
        assert checkpoints == [f"checkpoint {at}"]


@pytest.mark.parametrize("lag", [0, 1])
def test_the_last_evaluations_rewards_may_end_the_run_too(lag):
    made = run(lag=lag, config=evaluating(lag), unevaluated=2)
    assert isinstance(made.error, RewardError) and len(made.records.steps) == 2
    assert [event for event in made.events if "checkpoint" in event] == ["checkpoint 2"]


@pytest.mark.parametrize("lag", [0, 1])
def test_the_last_evaluation_is_on_record_before_the_last_checkpoint_is_judged(lag):
    made = run(lag=lag, config=evaluating(lag))
    assert made.error is None
    ends = [event for event in made.events if event in ("written 2", "evaluated 2", "finish")]
    assert ends == ["written 2", "evaluated 2", "finish"]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_metric_that_gets_no_better_ends_the_run_after_an_evaluation_and_a_checkpoint(lag):
    config = evaluating(lag)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 0})})
    made = run(lag=lag, config=config, plateau=["flat", "still flat"])
    assert made.error is None and len(made.records.steps) == 1
    assert made.records.ended == [("still flat", 1)]
    evaluations = [event for event in made.events if event.startswith("evaluate")]
    assert evaluations[-2:] == ["evaluate 1 at 1", "evaluated 1"]  # as after its last step


def test_the_last_evaluation_may_show_that_the_run_goes_on_and_is_not_made_twice():
    made = run(config=evaluating(0), plateau=["flat", None])
    assert len(made.records.steps) == 2 and made.records.ended == []
    begun = [event for event in made.events if event.startswith("evaluate ")]
    assert begun == [f"evaluate {step} at {step}" for step in range(3)]


def test_a_run_that_is_to_end_waits_for_no_sample_that_nobody_trains(monkeypatch):
    """Of the step after, whose prompts take for ever."""
    rollout, given_up = Environment.rollout, []

    async def slow(self, prompt, policy):
        if prompt.number < 2:
            return await rollout(self, prompt, policy)
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(prompt.number)

    monkeypatch.setattr(Environment, "rollout", slow)
    monkeypatch.setattr(Records, "stop_requested", True)
    made = run(lag=1, config=of_steps(3))
    assert len(made.records.steps) == 1 and made.events[-1] == "finish"
    assert given_up == [2, 3]


@pytest.mark.parametrize(("lag", "trained"), [(0, 1), (1, 2)])
def test_an_engine_that_dies_too_often_ends_the_run_after_the_update_and_a_checkpoint(
    monkeypatch, lag, trained
):
    """Over the third step's prompts or the second's; with lag 1 while another step is trained."""
    rollout, first = Environment.rollout, 2 * trained

    async def dies(self, prompt, policy):
        if prompt.number >= first:
            raise ActorFailed("engine-0", "it has ended; 2 restarts so far")
        return await rollout(self, prompt, policy)

    monkeypatch.setattr(Environment, "rollout", dies)
    made = run(lag=lag, config=of_steps(4), due=())
    assert isinstance(made.error, ActorFailed) and len(made.records.steps) == trained
    assert made.events[-3:] == [f"checkpoint {trained}", f"written {trained}", "finish"]


@pytest.mark.parametrize("whose", ["environment", "generator"])
@pytest.mark.parametrize(("lag", "trained"), [(0, 1), (1, 2)])
def test_what_a_users_code_raises_breaks_no_update_off_and_leaves_a_checkpoint(
    monkeypatch, lag, trained, whose
):
    """Over the third step's prompts or the second's; with lag 1 while another step is trained."""
    rollout, draw, first = Environment.rollout, Source.next, 2 * trained

    async def plays(self, prompt, policy):
        if whose == "environment" and prompt.number >= first:
            raise KeyError("score")
        return await rollout(self, prompt, policy)

    def next_rows(self, count):
        if whose == "generator" and self.drawn >= first:
            raise KeyError("score")
        return draw(self, count)

    monkeypatch.setattr(Environment, "rollout", plays)
    monkeypatch.setattr(Source, "next", next_rows)
    made = run(lag=lag, config=of_steps(4), due=())
    assert isinstance(made.error, KeyError) and len(made.records.steps) == trained
    assert made.events[-3:] == [f"checkpoint {trained}", f"written {trained}", "finish"]


def test_an_engine_that_does_not_come_back_before_an_update_leaves_a_checkpoint_too(monkeypatch):
    async def all_back(self):
        if self.events.count("update") == 1:
            raise ActorFailed("engine-0", "it has ended")

    monkeypatch.setattr(Engines, "all_back", all_back)
    made = run(due=())
    assert isinstance(made.error, ActorFailed)
    assert made.events[-3:] == ["checkpoint 1", "written 1", "finish"]


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_that_is_lost_over_a_version_leaves_a_checkpoint_of_the_step_that_made_it(
    monkeypatch, lag
):
    """The step was trained; a run that goes on serves its version."""

    async def publish(self, version, parts):
        if version == 2:
            raise EngineLost("engine-0", "it has ended; 2 restarts so far")
        return await FaultyEngines.publish(self, version, parts)

    monkeypatch.setattr(Engines, "publish", publish)
    made = run(lag=lag, config=of_steps(4), due=())
    assert isinstance(made.error, EngineLost)
    assert [facts.step for facts in made.records.steps] == [1, 2]
    assert made.records.steps[1].published.keys() == {"idle/trainer", "idle/engines"}
    assert made.events[-3:] == ["checkpoint 2", "written 2", "finish"]


def test_an_engine_that_is_lost_as_it_gives_way_leaves_a_checkpoint_too(monkeypatch):
    async def give_way(self):
        if self.events.count("update") == 1:
            raise EngineLost("engine-0", "it has ended")

    monkeypatch.setattr(Engines, "give_way", give_way)
    made = run(due=())
    assert isinstance(made.error, EngineLost)
    assert made.events[-3:] == ["checkpoint 1", "written 1", "finish"]


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_that_is_lost_over_an_evaluation_breaks_no_update_off(monkeypatch, lag):
    async def evaluate(self, step, version):
        await asyncio.sleep(0)
        if step == 1:
            raise EngineLost("engine-0", "it has ended; 2 restarts so far")

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    config = evaluating(lag)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 3})})
    made = run(lag=lag, config=config, due=())
    trained = 1 + lag  # with a lag another step is trained meanwhile
    assert isinstance(made.error, EngineLost) and len(made.records.steps) == trained
    assert made.events[-3:] == [f"checkpoint {trained}", f"written {trained}", "finish"]


def test_when_no_checkpoint_can_be_written_the_first_error_is_told(monkeypatch, caplog):
    async def checkpoint(self, step, book, tasks):
        raise ActorFailed("trainer-0", "it has ended too")

    monkeypatch.setattr(Records, "checkpoint", checkpoint)
    made = run(unrewarded=2)
    assert isinstance(made.error, RewardError)
    assert "step 1, the last that was trained, has no checkpoint: actor trainer-0" in caplog.text


def test_a_run_that_is_to_end_while_it_evaluates_ends_after_that(monkeypatch):
    evaluate = Evaluator.evaluate

    async def stopped(self, step, version):
        await evaluate(self, step, version)
        monkeypatch.setattr(Records, "stop_requested", step == 1)

    monkeypatch.setattr(Evaluator, "evaluate", stopped)
    made = run(config=evaluating(0), due=())
    assert made.error is None and len(made.records.steps) == 1
    assert made.events[-3:] == ["checkpoint 1", "written 1", "finish"]
