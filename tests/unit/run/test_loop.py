"""The loop over faulty ports: what stops a run, and what the trainer is given."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from faulty_ports import OTHER, FaultyEngines, NoChannel, PlainTrainer, Prompts

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.kl_control import KLControl
from lora_moe_rl.algorithms.parts.reweight import draw
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.data.samples import Group, Sample, Segment, UpdateResult
from lora_moe_rl.errors import MismatchError, RefitError, RewardError
from lora_moe_rl.run import loop
from lora_moe_rl.run.evaluations import Evaluations
from lora_moe_rl.run.publisher import Publisher
from lora_moe_rl.run.schedule import Schedule, seed_of
from lora_moe_rl.run.tickets import TicketBook
from lora_moe_rl.telemetry.timeline import Timeline

CONFIG = RunConfig(
    trainer={"steps": 2}, algorithm={"name": "grpo", "prompts_per_step": 2, "group_size": 2}
)


class Trainer(PlainTrainer):
    """Each update makes a version, but for the steps `skipped`. Keeps the batches; `events` is
    what happened in turn."""

    skipped: tuple[int, ...] = ()

    def __init__(self, events: list[str]):
        super().__init__()
        self.batches, self.events = [], events

    async def update(self, batch, routes):
        self.events.append("update")
        for _ in range(20):  # others have time
            await asyncio.sleep(0)
        self.batches.append(batch)
        self.version += batch.step not in self.skipped
        metrics = {"loss/kl": 0.01 * batch.step}
        return UpdateResult(self.version, metrics, 0, 0, 1.0), await self.send()


class Engines(FaultyEngines):
    """`asked`: the (version, seed) of every ticket."""

    restarts = 0

    def policy(self, version, seed, watch):
        self.asked.append((version, seed))

    async def all_back(self) -> None:
        self.events.append("all back")

    def overwrite(self) -> None:
        self.events.append("overwrite")

    async def give_way(self) -> None:
        self.events.append("give way")

    async def pin(self, version) -> None:
        self.events.append(f"pin {version}")


class Source(Prompts):
    drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]

    def next(self, count):
        self.drawn += count
        found = super().next(self.drawn)[-count:]
        return [replace(prompt, row=self.drawn - 1) for prompt in found]


class Environment:
    """The first sample of each group is right, the second wrong; but for the first `equal` prompts,
    where both are right, and the first `failed`, where the second one's reward failed. A `slow`
    prompt comes, the first time, when the trainer waits for it."""

    def __init__(
        self, events: list[str], book: TicketBook, equal: int = 0, slow: int = -1, failed: int = 0
    ):
        self.events, self.book, self.equal, self.slow = events, book, equal, slow
        self.failed = failed

    async def rollout(self, prompt, policy) -> Group:
        self.events.append(f"roll {prompt.row}")
        await asyncio.sleep(0)
        if prompt.row == self.slow:
            self.slow = -1
            while not self.book.waits["the oldest groups"] and not self.book.closed:
                await asyncio.sleep(0)
        rewards = [1, 1] if prompt.row < self.equal else [1, 0]
        failures = ["the judge is gone"] if prompt.row < self.failed else []
        rewards = [1, np.nan] if failures else rewards
        response = Segment.sampled([7, 8], np.zeros(2), 0)
        sample = Sample((Segment.given("user", prompt.token_ids), response), "stop", "")
        return Group(prompt, [sample, sample], None, np.array(rewards, np.float32), failures)


class Records:
    """`refuses`: raises for this step's update; `unrewarded`: for this step's rewards. `plateau`:
    what it says each time it is asked, then None. A checkpoint is due at the steps `due`."""

    stop_requested = False

    def __init__(self, refuses=0, unrewarded=0, plateau=(), due=(2,)):
        self.plateau, self.ended = list(plateau), []
        self.refuses, self.unrewarded, self.steps, self.again = refuses, unrewarded, [], 0
        self.kept: list[tuple] = []
        self.due, self.books = due, []
        self.updated: list[tuple[int, int]] = []

    def progress(self):
        return nullcontext()

    def check_update(self, step, groups, signals, result):
        assert len(groups) == len(signals) == 2
        if step == self.refuses:
            raise MismatchError("too far apart")

    def step(self, facts, clock):
        self.steps.append(facts)

    def rolled(self, number): ...

    def check_rewards(self, groups):
        if len(self.steps) + 1 == self.unrewarded:
            raise RewardError("the judge is gone")

    def keep_unrewarded(self, step, groups):
        self.kept.append((step, [group.prompt.row for group in groups]))
        return True

    def check_ages(self, step, groups, version):
        assert len(groups) == 2
        self.updated.append((step, version))

    def drawn_again(self, group):
        self.again += 1
        if self.again > 4:
            raise RewardError("no prompt has a signal")

    def checkpoint_is_due(self, step):
        return step in self.due

    async def checkpoint(self, step, book, tasks):
        self.events.append(f"checkpoint {step}")
        self.books.append(book)
        for _ in range(60):
            await asyncio.sleep(0)
        self.events.append(f"written {step}")

    async def finish(self):
        self.events.append("finish")

    def plateau_at(self, step):
        return self.plateau.pop(0) if self.plateau else None

    def end_early(self, ended, step):
        self.ended.append((ended, step))
        return True


class Evaluator:
    """Takes as long as an update, and longer. The rewards of the step `failing` fail."""

    def __init__(self, events: list[str], failing: int):
        self.events, self.failing = events, failing

    async def evaluate(self, step, version):
        self.events.append(f"evaluate {step} at {version}")
        for _ in range(60):
            await asyncio.sleep(0)
        if step == self.failing:
            raise RewardError("the judge is gone")
        self.events.append(f"evaluated {step}")


class Teacher:
    """Says the same of every sample."""

    async def score(self, group: Group) -> None:
        await asyncio.sleep(0)
        group.teacher = [np.array([-0.5, -2.0], np.float32) for _ in group.samples]


def run(
    engines=None,
    refuses=0,
    lag=0,
    equal=0,
    config=CONFIG,
    stale="wait",
    slow=-1,
    unrewarded=0,
    teacher=None,
    recorded=(),
    plateau=(),
    failed=0,
    unevaluated=-1,
    due=(2,),
    kl=None,
    skipped=(),
) -> SimpleNamespace:
    """Ends as the run does; what it was made of can be looked at in any case."""
    events: list[str] = []
    engines = engines or Engines()
    engines.events, engines.asked, engines.step = events, [], 0.1
    made = SimpleNamespace(
        trainer=Trainer(events),
        engines=engines,
        records=Records(refuses, unrewarded, plateau, due),
        events=events,
        timeline=[],
        error=None,
    )
    made.records.events = events
    made.trainer.skipped = skipped
    source = Source()
    publisher = Publisher(config, made.trainer, engines, NoChannel(), source, "float32")
    book = TicketBook(Schedule(2, lag, stale=stale))
    environment = Environment(events, book, equal, slow, failed)
    algorithm = algorithms.make(config)
    ports = loop.Ports(
        config,
        source,
        environment,
        algorithm,
        engines,
        made.trainer,
        publisher,
        made.records,
        Timeline(1, made.timeline.append),
        Evaluations(config, Evaluator(events, unevaluated), engines, recorded),
        teacher,
        kl,
    )
    try:
        asyncio.run(loop.run(ports, book, 1))
    except (RefitError, MismatchError, RewardError) as error:
        made.error = error
    return made


def test_the_trainer_gets_the_advantages_as_the_algorithm_gave_them():
    made = run()
    assert made.error is None and len(made.records.steps) == len(made.trainer.batches) == 2
    for batch in made.trainer.batches:
        signs = [float(np.sign(advantages).mean()) for advantages in batch.advantages]
        assert signs == [1, -1, 1, -1]


def test_a_teacher_scores_each_group_before_its_advantages_are_made():
    algorithm = {"name": "opd", "prompts_per_step": 2, "group_size": 2}
    made = run(config=RunConfig(trainer={"steps": 2}, algorithm=algorithm), teacher=Teacher())
    assert made.error is None and len(made.trainer.batches) == 2
    for batch in made.trainer.batches:
        assert [one.tolist() for one in batch.advantages] == [[-0.5, -2.0]] * 4


def test_the_weight_of_the_kl_follows_the_kl_of_each_step_that_trained_the_policy():
    """Of 0.01, 0.02, …; the target is 0.02. A step has 4 samples, the horizon is 8."""
    config = with_settings(CONFIG, {"trainer": {"steps": 4}})
    control = KLControl(0.1, target=0.02, horizon=8, samples=4)
    made = run(config=config, kl=control, skipped=(2,), due=(3, 4))
    assert made.error is None
    first = 0.1 * (1 - 0.2 / 2)  # half of the target: 0.2 below at most
    wanted = [0.1, first, first, first * (1 + 0.2 / 2)]
    assert [batch.kl_coef for batch in made.trainer.batches] == pytest.approx(wanted, rel=1e-12)
    shown = [facts.result.metrics["loss/kl_coef"] for facts in made.records.steps]
    assert shown == [batch.kl_coef for batch in made.trainer.batches]
    # A checkpoint after a step has what the next one begins with.
    assert made.records.books[0]["kl_coef"] == made.trainer.batches[3].kl_coef
    assert made.records.books[1]["kl_coef"] == control.coef
    assert run().trainer.batches[0].kl_coef is None and "kl_coef" not in run().records.books[0]


def test_each_ticket_is_sampled_with_a_seed_of_its_own_and_the_newest_version():
    asked = run().engines.asked
    assert asked[:4] == [(number // 2, seed_of(CONFIG.seed, number, 2)) for number in range(4)]
    assert len({seed for _, seed in asked}) == len(asked)


def test_an_update_waits_for_engines_that_are_coming_back():
    about = ("all back", "overwrite", "give way", "update")
    assert [event for event in run().events if event in about] == [*about] * 2


def rolled_by_update(lag: int) -> list[list[int]]:
    """Which prompts were rolled before the first update, between it and the second, and after."""
    found = [[]]
    for event in run(lag=lag).events:
        if event == "update":
            found.append([])
        elif event.startswith("roll"):
            found[-1].append(int(event.split()[1]))
    return found


def test_with_lag_0_sampling_and_training_take_turns():
    assert rolled_by_update(0) == [[0, 1], [2, 3], []]


def test_with_lag_1_the_next_step_is_sampled_before_this_one_is_trained():
    assert rolled_by_update(1) == [[0, 1, 2, 3], [], [4, 5]]


@pytest.mark.parametrize(
    ("stale", "rows", "counted"),
    [
        ("wait", [[1, 2], [0, 3], [4, 5], [6, 7]], [0, 0, 0, 0]),
        ("train", [[1, 2], [3, 4], [0, 5], [6, 7]], [0, 0, 1, 1]),
        ("drop", [[1, 2], [3, 4], [5, 6], [7, 8]], [0, 0, 1, 1]),
        ("redraw", [[1, 2], [3, 4], [5, 6], [0, 7]], [0, 0, 1, 1]),
    ],
)
def test_a_group_that_is_long_in_coming_is_waited_for_or_may_be_too_old(stale, rows, counted):
    """With lag 1, in the third step it would be two versions old."""
    config = CONFIG.model_copy(
        update={"trainer": CONFIG.trainer.model_copy(update={"steps": len(rows)})}
    )
    steps = run(lag=1, config=config, stale=stale, slow=0).records.steps
    assert [[group.prompt.row for group in facts.groups] for facts in steps] == rows
    assert [facts.stale for facts in steps] == counted


def test_the_age_of_a_steps_tokens_is_checked_against_the_version_that_is_updated():
    made = run()
    assert made.error is None and made.records.updated == [(1, 0), (2, 1)]


def test_prompts_without_a_signal_are_replaced_when_that_is_asked():
    config = CONFIG.model_copy(
        update={"algorithm": CONFIG.algorithm.model_copy(update={"draw_again": 2})}
    )
    made = run(equal=3, config=config)
    assert made.error is None and made.records.again == 3
    rows = [[group.prompt.row for group in facts.groups] for facts in made.records.steps]
    assert rows == [[3, 4], [5, 6]]
    assert isinstance(run(equal=99, config=config).error, RewardError)
    rows = [[group.prompt.row for group in facts.groups] for facts in run(equal=3).records.steps]
    assert rows == [[0, 1], [2, 3]]


def test_groups_with_failed_rewards_are_not_drawn_again_and_stop_the_run_as_always():
    """One of two rewards has failed, which leaves nothing to compare, and is no equal reward."""
    algorithm = CONFIG.algorithm.model_copy(update={"draw_again": 1})
    config = CONFIG.model_copy(update={"algorithm": algorithm})
    made = run(failed=3, equal=1, config=config)
    assert made.error is None and made.records.again == 0
    rows = [[group.prompt.row for group in facts.groups] for facts in made.records.steps]
    assert rows == [[0, 1], [2, 3]]
    made = run(failed=99, unrewarded=1, config=config)
    assert isinstance(made.error, RewardError) and made.records.again == 0
    assert made.records.kept == [(1, [0, 1])]


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


def test_the_proof_takes_pieces_of_the_steps_own_samples():
    made = run()
    probed = [sequences for sequences, version in made.engines.scored if version]
    for sequences, batch in zip(probed, made.trainer.batches, strict=True):
        of_step = [token_ids.tolist() for token_ids in batch.token_ids]
        assert len(sequences) == 4 and all(piece in of_step for piece in sequences[2:])


def test_a_step_whose_rewards_stop_the_run_is_kept_and_drawn_again():
    made = run(unrewarded=2)
    assert isinstance(made.error, RewardError) and len(made.records.steps) == 1
    assert made.records.kept == [(2, [2, 3])]
    (book,) = made.records.books
    assert book["data"] == {"drawn": 2}
    assert made.events[-3:] == ["checkpoint 1", "written 1", "finish"]


def test_samples_are_drawn_by_the_seed_and_the_step_whatever_came_before():
    """So that a run that goes on after step 1 draws in step 2 what it would have drawn."""
    update = {"algorithm": CONFIG.algorithm.model_copy(update={"reweight": "max_random"})}
    made = run(config=CONFIG.model_copy(update=update))
    assert made.error is None and len(made.trainer.batches) == 2
    for step, batch in enumerate(made.trainer.batches, start=1):
        draws = np.random.default_rng([CONFIG.seed, step, 1])
        wanted = draw(np.array([1.0, 0.0] * 2), "max_random", 2.0, draws)
        assert batch.copies.tolist() == wanted.tolist()


def evaluating(lag: int) -> RunConfig:
    sets = {"sums": {"path": "sums.jsonl"}}
    more = {"eval": {"sets": sets, "every": 1}, "schedule": {"lag": lag}}
    return RunConfig.model_validate(CONFIG.model_dump(exclude_unset=True) | more)


def test_with_lag_0_evaluations_come_between_steps():
    made = run(config=evaluating(0))
    told = ("evaluate", "roll ", "update")
    assert [event for event in made.events if event.startswith(told)] == [
        *("evaluate 0 at 0", "evaluated 0"),
        *("roll 0", "roll 1", "update", "evaluate 1 at 1", "evaluated 1"),
        *("roll 2", "roll 3", "update", "evaluate 2 at 2", "evaluated 2"),
    ]


def test_with_lag_training_goes_on_and_the_run_ends_after_its_evaluations():
    made = run(lag=1, config=evaluating(1))
    assert made.error is None
    begun, ended = made.events.index("evaluate 0 at 0"), made.events.index("evaluated 0")
    assert made.events.index("pin 0") < begun
    assert {"roll 0", "roll 1", "update"} & set(made.events[begun:ended])
    assert made.events.index("evaluated 1") < made.events.index("evaluate 2 at 2")
    assert made.events[-2:] == ["evaluated 2", "pin None"]


@pytest.mark.parametrize("lag", [0, 1])
def test_while_a_checkpoint_is_written_nothing_is_trained_and_with_lag_engines_go_on(lag):
    settings = CONFIG.model_dump(exclude_unset=True) | {"schedule": {"lag": lag}}
    made = run(lag=lag, due=(1,), config=RunConfig.model_validate(settings))
    begun, ended = (made.events.index(f"{what} 1") for what in ("checkpoint", "written"))
    meanwhile = made.events[begun + 1 : ended]
    assert meanwhile == (["roll 4", "roll 5"] if lag else [])
    assert made.records.books[0]["data"] == {"drawn": 2}  # as it was when the step had ended
    assert made.events.count("update") == 2 and made.events[-1] == "finish"
    spans = [span[:3] for step in made.timeline for span in step["spans"]]
    assert ["trainer", "checkpoint", 1] in spans


def test_a_checkpoint_waits_for_the_evaluations_before_its_step():
    events = run(lag=1, config=evaluating(1)).events
    assert events.index("evaluated 1") < events.index("checkpoint 2")
    assert events.index("checkpoint 2") < events.index("evaluate 2 at 2")


@pytest.mark.parametrize("lag", [0, 1])
def test_evaluating_changes_nothing_that_is_trained(lag):
    plain, other = run(lag=lag), run(lag=lag, config=evaluating(lag))
    asked = plain.engines.asked  # versions and seeds, in turn
    assert other.engines.asked[: len(asked)] == asked
    for one, two in zip(plain.trainer.batches, other.trainer.batches, strict=True):
        assert [a.tolist() for a in one.advantages] == [a.tolist() for a in two.advantages]


def test_what_is_on_record_is_not_evaluated_again():
    made = run(config=evaluating(0), recorded={0, 1})
    assert [event for event in made.events if "evaluate " in event] == ["evaluate 2 at 2"]


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
