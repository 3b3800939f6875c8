"""Tokens that a loss selects by a statistic over an optimizer step, by hand; test_oracles.py
compares them with verl's and TRL's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from packed_tokens import tokens_of

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.selection import StepTokens, covariances, drawn, largest, lots_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.metric_table import table

CLIP = ["algorithm.loss=clip_cov", "algorithm.clip_cov_lb=0.4", "algorithm.clip_cov_ub=2.2"]
KL = ["algorithm.loss=kl_cov", "algorithm.mini_batches=2"]
HIGH = "algorithm.top_entropy_quantile"


def made(*settings: str):
    return algorithms.make(override(RunConfig(), list(settings)))


def step_of(logprobs, advantages, lots=None, entropy=None, old=None, rollout=None) -> StepTokens:
    logprobs = np.array(logprobs, float)
    return StepTokens(
        logprobs,
        logprobs if old is None else np.array(old, float),
        logprobs if rollout is None else np.array(rollout, float),
        np.array(advantages, float),
        np.linspace(0, 1, len(logprobs)) if lots is None else np.array(lots, float),
        None if entropy is None else np.array(entropy, float),
    )


# Means -2 and 0.5: what each adds is (A - 0.5)(logprob + 2).
LOGPROBS, ADVANTAGES = [-1.0, -1.0, -3.0, -3.0, -4.0, 0.0], [1.0, 0.0, 1.0, 0.0, -0.5, 1.5]
ADDED = [0.5, -0.5, -0.5, 0.5, 2.0, 2.0]


def test_what_tokens_add_to_the_covariance_is_against_the_means_of_the_step():
    step = step_of(LOGPROBS, ADVANTAGES)
    assert covariances(step).tolist() == ADDED
    assert covariances(step).mean() == np.cov(LOGPROBS, ADVANTAGES, ddof=0)[0, 1]


@pytest.mark.parametrize(
    ("share", "chosen"),
    [(0.01, [4]), (0.34, [4, 5]), (0.5, [0, 4, 5]), (1.0, [0, 3, 4, 5])],
)
def test_of_the_tokens_between_the_bounds_those_of_the_smallest_lots_are_drawn(share, chosen):
    """At least one, and never one that is not between them: the second token's lot is the
    smallest."""
    step = step_of(LOGPROBS, ADVANTAGES, lots=[0.6, 0.1, 0.2, 0.9, 0.3, 0.4])
    found = made(*CLIP, f"algorithm.clip_cov_ratio={share}").select(step)
    assert np.flatnonzero(found.tokens).tolist() == chosen
    assert found.metrics == {
        "covariance": pytest.approx(4 / 6),
        "covariance_largest": 2.0,
        "covariance_within": pytest.approx(4 / 6),
    }


def test_bounds_are_not_between_them():
    step = step_of(LOGPROBS, ADVANTAGES)
    within = ["algorithm.clip_cov_lb=0.5", "algorithm.clip_cov_ub=2"]
    found = made("algorithm.loss=clip_cov", *within, "algorithm.clip_cov_ratio=1").select(step)
    assert not found.tokens.any() and found.metrics["covariance_within"] == 0


def test_a_token_that_the_clip_holds_already_is_not_drawn():
    """Against the engine: the first token is twice as likely as there, and is to become likelier;
    the fifth half as likely, and is to become unlikelier. The fourth may come back."""
    rollout = np.array(LOGPROBS) - np.log([2, 1, 1, 2, 0.5, 1])
    step = step_of(LOGPROBS, ADVANTAGES, rollout=rollout)
    settings = [*CLIP, "algorithm.clip_cov_ratio=1"]
    assert np.flatnonzero(made(*settings).select(step).tokens).tolist() == [0, 3, 4, 5]
    found = made(*settings, "algorithm.anchor=rollout").select(step)
    assert np.flatnonzero(found.tokens).tolist() == [3, 5]


def test_every_token_between_the_bounds_is_drawn_as_often_as_another():
    """Two of four, in 3000 steps: each in about half of them."""
    candidates, counts = np.array([True, True, False, True, True]), np.zeros(5)
    for step in range(3000):
        found = drawn(candidates, 2, lots_of(0, step, 0, 1, 5)[0])
        assert found.sum() == 2
        counts += found
    assert counts[2] == 0
    np.testing.assert_allclose(counts[candidates] / 3000, 0.5, atol=0.04)


def test_the_largest_covariances_are_penalised_and_of_equal_ones_those_of_the_smallest_lots():
    lots = [0.6, 0.1, 0.2, 0.5, 0.9, 0.3]
    step = step_of(LOGPROBS, ADVANTAGES, lots=lots)
    for share, chosen in ((0.01, [5]), (0.34, [4, 5]), (0.5, [3, 4, 5]), (0.67, [0, 3, 4, 5])):
        found = made(*KL, f"algorithm.kl_cov_ratio={share}").select(step)
        assert np.flatnonzero(found.tokens).tolist() == chosen
        assert found.metrics["covariance_threshold"] == min(ADDED[i] for i in chosen)


@pytest.mark.parametrize(
    ("quantile", "threshold", "chosen"),
    [(0.25, 2.0, [2, 3]), (0.5, 1.0, [1, 2, 3, 4]), (0.1, 2.6, [3]), (0.85, 0.6, [1, 2, 3, 4])],
)
def test_tokens_of_the_highest_entropy_are_learned_from(quantile, threshold, chosen):
    """Of 0, 1, 1, 2 and 3 the uppermost quarter begins at 2, the half at the second 1; of a tenth
    the threshold lies between two of them. All that are at the threshold are chosen."""
    step = step_of(np.zeros(5), np.zeros(5), entropy=[0.0, 1.0, 2.0, 3.0, 1.0])
    found = made(f"{HIGH}={quantile}").select(step)
    assert found.metrics == {"entropy_threshold": pytest.approx(threshold)}
    assert np.flatnonzero(found.tokens).tolist() == chosen


def test_rounding_parts_no_tokens_of_one_entropy():
    """The first tokens of a group follow the same prompt: the threshold is that of all of them,
    whatever the last bits that a layout gives each."""
    rounded = 1.25 + np.array([0.0, 2, -3, 1, -1, 3, 0, -2]) * 2**-22
    step = step_of(np.zeros(12), np.zeros(12), entropy=[*rounded, 0.0, 1.2499, 1.2501, 2.0])
    found = made(f"{HIGH}=0.5").select(step)
    assert np.flatnonzero(found.tokens).tolist() == [*range(8), 10, 11]


def test_of_covariances_that_rounding_parts_those_of_the_smallest_lots_are_penalised():
    tails = np.array([0.0, 2, -3, 1]) * 2**-22
    values = np.array([*(0.5 + tails), 0.6, 0.4])
    for lots, chosen in (([3, 1, 2, 4, 9, 0], [1, 2, 4]), ([1, 2, 4, 3, 9, 0], [0, 1, 4])):
        found = largest(values, 3, np.array(lots) / 10)
        assert np.flatnonzero(found).tolist() == chosen
    assert largest(values, 6, np.zeros(6)).all()


def test_lots_are_the_same_for_the_same_token_whatever_else_there_is():
    """They depend on the seed, the step, the sample and the place alone."""
    lots = lots_of(3, 7, 5, 2, 4)
    assert lots.shape == (2, 4) and len({*lots.ravel().tolist()}) == 8
    assert lots_of(3, 7, 5, 2, 4).tolist() == lots.tolist()
    for other in ((4, 7, 5), (3, 8, 5), (3, 7, 6)):
        assert not np.isin(lots_of(*other, 2, 4), lots).any()


def three_tokens():
    """Ratios 2, 0.5 and 2, advantages 1, 1 and -1; the first and the last are selected."""
    logprobs = torch.tensor([2.0, 0.5, 2.0]).log().requires_grad_()
    tokens = tokens_of(logprobs, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]))
    return logprobs, replace(tokens, selected=torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("settings", "values", "gradient"),
    [
        # The first is clipped anyway.
        (["algorithm.loss=clip_cov", "algorithm.clip_high=3"], [0, -0.5, 0], [0, -0.5, 0]),
        # 0.5 |log ratio| of the first and the last, both of which have gone up.
        (
            [*KL, "algorithm.ppo_kl_coef=0.5"],
            [-2 + 0.5 * np.log(2), -0.5, 2 + 0.5 * np.log(2)],
            [-2 + 0.5, -0.5, 2 + 0.5],
        ),
        ([f"{HIGH}=0.5", "algorithm.clip_high=3"], [-2, 0, 2], [-2, 0, 2]),
    ],
)
def test_the_losses_by_hand(settings, values, gradient):
    logprobs, tokens = three_tokens()
    algorithm = made(*settings)
    found = algorithm.loss(tokens)
    np.testing.assert_allclose(found.values.detach(), values, rtol=1e-6)
    found.values.sum().backward()
    np.testing.assert_allclose(logprobs.grad, gradient, rtol=1e-6)
    assert set(found.metrics) == set(algorithm.metrics)
    assert found.metrics["selected"].tolist() == [1, 0, 1]


def test_a_kl_is_of_all_tokens_and_an_entropy_bonus_of_those_that_are_selected():
    _, tokens = three_tokens()
    algorithm = made(f"{HIGH}=0.5", "algorithm.kl_coef=1", "algorithm.entropy_coef=0.5")
    tokens = replace(tokens, advantages=torch.zeros(3), reference=torch.zeros(3))
    tokens = replace(tokens, entropy=torch.tensor([1.0, 2.0, 3.0]))
    k3 = [0.5 - 1 + np.log(2), 2 - 1 - np.log(2), 0.5 - 1 + np.log(2)]
    found = algorithm.loss(tokens).values.detach()
    np.testing.assert_allclose(found, np.array(k3) - [0.5, 0, 1.5], rtol=1e-6)


@pytest.mark.parametrize("settings", [CLIP, KL, [f"{HIGH}=0.5"]])
def test_what_is_missing_is_an_error_and_a_forward_before_the_update_is_made(settings):
    algorithm, config = made(*settings), override(RunConfig(), settings)
    assert algorithm.selects and algorithms.passes(config) == {"old"}
    with pytest.raises(ValueError, match="they are missing"):
        algorithm.loss(replace(three_tokens()[1], selected=None))
    assert not made().selects and algorithms.passes(RunConfig()) == frozenset()


def test_without_entropies_there_is_no_quantile():
    with pytest.raises(ValueError, match="top_entropy_quantile wants the tokens' entropy"):
        made(f"{HIGH}=0.5").select(step_of(LOGPROBS, ADVANTAGES))


@pytest.mark.parametrize("settings", [CLIP, KL, [f"{HIGH}=0.5"]])
def test_what_is_told_of_a_step_is_in_the_table_of_metrics(settings):
    step = step_of(LOGPROBS, ADVANTAGES, entropy=np.ones(6))
    names = made(*settings).select(step).metrics
    assert names and [name for name in names if f"loss/{name}" not in table()] == []


def test_a_loss_of_ones_own_selects_by_having_the_method_and_not_by_saying_so(tmp_path):
    (tmp_path / "own.py").write_text(
        "from lora_moe_rl.algorithms.losses.base import PolicyLoss\n\n\n"
        "class Says(PolicyLoss):\n    selects = True\n"
    )
    (tmp_path / "other.py").write_text(
        "from lora_moe_rl.algorithms.losses.kl_cov import KLCov\n\n\n"
        "class Has(KLCov):\n    def select(self, tokens):\n        return super().select(tokens)\n"
    )
    with pytest.raises(ConfigError, match="Says declares selects: leave it out"):
        made(f"algorithm.loss={tmp_path}/own.py:Says")
    assert made(f"algorithm.loss={tmp_path}/other.py:Has", KL[1]).selects
