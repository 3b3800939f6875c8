"""What the loop samples, trains and publishes, in which turn."""

from __future__ import annotations

import numpy as np
import pytest
from loop_run import CONFIG, Teacher, of_steps, run

from lora_moe_rl.algorithms.parts.kl_control import KLControl
from lora_moe_rl.algorithms.parts.reweight import draw
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import EngineDied, RewardError
from lora_moe_rl.run.schedule import seed_of


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


class Dying(Teacher):
    """The engine that is to score dies over the second group, once."""

    def __init__(self):
        self.groups = 0

    async def score(self, group):
        self.groups += 1
        if self.groups == 2:
            raise EngineDied("gone")
        await super().score(group)


def test_a_group_whose_scoring_engine_died_is_sampled_once_more():
    algorithm = {"name": "sdpo", "prompts_per_step": 2, "group_size": 2}
    teacher = Dying()
    made = run(config=RunConfig(trainer={"steps": 2}, algorithm=algorithm), teacher=teacher)
    assert made.error is None and len(made.trainer.batches) == 2 and teacher.groups == 5
    assert len(made.engines.asked) == 5 and len({*made.engines.asked}) == 4


REMAX = with_settings(CONFIG, {"algorithm": {"advantage": "remax"}})


def test_a_greedy_sample_of_each_prompt_is_the_baseline_and_in_no_batch():
    """Of rewards 1 and 0 against its 0.5; it has the version and the seed of its ticket. Where all
    are right it tells them from itself, and nothing is drawn again."""
    made = run(config=REMAX, equal=[2])
    assert made.error is None and len(made.trainer.batches) == 2
    signs = [[one.tolist() for one in batch.advantages] for batch in made.trainer.batches]
    assert signs == [[[0.5] * 2, [-0.5] * 2] * 2, [[0.5] * 2, [0.5] * 2, [0.5] * 2, [-0.5] * 2]]
    assert len(made.engines.asked) == 8 and len({*made.engines.asked}) == 4
    again = with_settings(REMAX, {"algorithm": {"draw_again": 2}})
    made = run(config=again, equal=[2])
    assert made.error is None and made.records.again == 0
    assert run(config=with_settings(CONFIG, {"algorithm": {"draw_again": 2}}),
               equal=[2]).records.again == 1  # fmt: skip


def test_where_the_greedy_sample_has_failed_so_has_its_group():
    made = run(config=REMAX, failed=1)
    (first, second), *_ = (facts.groups for facts in made.records.steps)
    assert np.isnan(first.rewards).all() and second.baseline == 0.5
    assert first.failures == ["the judge is gone", "its greedy sample, the judge is gone"]
    assert first.details.reasons == {0: "its greedy sample, the judge is gone"}
    weights = [one.tolist() for one in made.trainer.batches[0].weights]
    assert weights == [[0, 0], [0, 0], [1, 1], [1, 1]]


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
    """Which prompts were rolled before the first update, between it and the second, and so on:
    those of three steps, and none that nobody would train."""
    found = [[]]
    for event in run(lag=lag, config=of_steps(3)).events:
        if event == "update":
            found.append([])
        elif event.startswith("roll"):
            found[-1].append(int(event.split()[1]))
    return found


def test_with_lag_0_sampling_and_training_take_turns():
    assert rolled_by_update(0) == [[0, 1], [2, 3], [4, 5], []]


def test_with_lag_1_the_next_step_is_sampled_before_this_one_is_trained():
    assert rolled_by_update(1) == [[0, 1, 2, 3], [], [4, 5], []]
    assert rolled_by_update(4) == [[0, 1, 2, 3, 4, 5], [], [], []]


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
    assert [[group.prompt.number for group in facts.groups] for facts in steps] == rows
    assert [facts.stale for facts in steps] == counted


def test_the_age_of_a_steps_tokens_is_checked_against_the_version_that_is_updated():
    made = run()
    assert made.error is None and made.records.updated == [(1, 0), (2, 1)]


def test_prompts_without_a_signal_are_replaced_when_that_is_asked():
    config = CONFIG.model_copy(
        update={"algorithm": CONFIG.algorithm.model_copy(update={"draw_again": 2})}
    )
    made = run(equal=range(3), config=config)
    assert made.error is None and made.records.again == 3
    rows = [[group.prompt.number for group in facts.groups] for facts in made.records.steps]
    assert rows == [[3, 4], [5, 6]]
    assert isinstance(run(equal=range(99), config=config).error, RewardError)
    rows = [
        [group.prompt.number for group in facts.groups]
        for facts in run(equal=range(3)).records.steps
    ]
    assert rows == [[0, 1], [2, 3]]


def test_the_proof_takes_pieces_of_the_steps_own_samples():
    made = run()
    probed = [sequences for sequences, version in made.engines.scored if version]
    for sequences, batch in zip(probed, made.trainer.batches, strict=True):
        of_step = [token_ids.tolist() for token_ids in batch.token_ids]
        assert len(sequences) == 4 and all(piece in of_step for piece in sequences[2:])


def test_samples_are_drawn_by_the_seed_and_the_step_whatever_came_before():
    """So that a run that goes on after step 1 draws in step 2 what it would have drawn."""
    update = {"algorithm": CONFIG.algorithm.model_copy(update={"reweight": "max_random"})}
    made = run(config=CONFIG.model_copy(update=update))
    assert made.error is None and len(made.trainer.batches) == 2
    for step, batch in enumerate(made.trainer.batches, start=1):
        draws = np.random.default_rng([CONFIG.seed, step, 1])
        wanted = draw(np.array([1.0, 0.0] * 2), "max_random", 2.0, draws)
        assert batch.copies.tolist() == wanted.tolist()
