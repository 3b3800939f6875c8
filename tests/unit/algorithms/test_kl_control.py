"""A weight of the KL that follows the KL: numbers worked out by hand, and what takes the weight."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.base import Known, Tokens
from lora_moe_rl.algorithms.parts.kl_control import KLControl
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import CheckpointError, ConfigError


def test_it_grows_above_the_target_and_falls_below_it_by_a_fifth_of_the_share_at_most():
    """Target 0.02, steps of 10 samples, horizon 100: by 2 % at most."""
    control = KLControl(0.1, target=0.02, horizon=100, samples=10)
    for kl, wanted in (
        (0.02, 0.1),  # as it should be
        (0.021, 0.1 * 1.005),  # 5 % above: 0.05 * 10 / 100
        (0.05, 0.1 * 1.005 * 1.02),  # 150 % above counts as 20 %
        (0.0, 0.1 * 1.005 * 1.02 * 0.98),
        (-0.3, 0.1 * 1.005 * 1.02 * 0.98 * 0.98),  # k1 may be below 0
        (math.nan, 0.1 * 1.005 * 1.02 * 0.98 * 0.98),
    ):
        control.follow(kl)
        assert control.coef == pytest.approx(wanted, rel=1e-14)


def test_it_goes_on_from_a_checkpoint_to_the_last_bit():
    whole, first, second = (KLControl(0.1, 0.02, 100, 10) for _ in range(3))
    kls = np.random.default_rng(0).uniform(0, 0.05, 20)
    for kl in kls:
        whole.follow(kl)
    for kl in kls[:7]:
        first.follow(kl)
    second.load_state_dict(json.loads(json.dumps(first.state_dict() | {"step": 7})))
    for kl in kls[7:]:
        second.follow(kl)
    assert second.coef == whole.coef != 0.1
    second.load_state_dict({"step": 7})  # of a run whose weight stayed
    assert second.coef == whole.coef
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(CheckpointError, match="no weight of a KL"):
            second.load_state_dict({"kl_coef": bad})


def made(*settings: str):
    return algorithms.make(override(RunConfig(), [*settings]))


def test_an_algorithm_has_one_where_a_target_is_set():
    given = ("algorithm.kl_coef=0.1", "algorithm.kl_target=0.02", "algorithm.kl_horizon=500")
    settings = ("algorithm.prompts_per_step=4", "algorithm.group_size=6")
    assert made(*given, *settings).kl_control == KLControl(0.1, 0.02, 500, 24)
    assert made("algorithm.kl_coef=0.1").kl_control is None
    assert made("algorithm=dpo").kl_control is None


def tokens(**more) -> Tokens:
    values = torch.tensor([-1.0, -2.0])
    return Tokens(
        mask=torch.tensor([True, True]),
        logprobs=values,
        old=values,
        rollout=values,
        reference=values - 0.5,
        advantages=torch.zeros(2),
        versions=torch.zeros(2, dtype=torch.int32),
        samples=torch.zeros(2, dtype=torch.int64),
        num_samples=2,
        **more,
    )


def test_the_loss_weighs_the_kl_by_that_of_the_step():
    algorithm = made("algorithm.kl_coef=0.1", "algorithm.kl_target=0.02")
    kl = math.exp(-0.5) - 1 + 0.5
    for coef, given in ((0.1, {}), (0.3, {"kl_coef": 0.3})):
        found = algorithm.loss(tokens(**given))
        torch.testing.assert_close(found.values, torch.full((2,), coef * kl))
        torch.testing.assert_close(found.metrics["kl"], torch.full((2,), kl))


def test_rewards_lose_by_that_of_the_step():
    """k1 of 0.5 a token: of two tokens 1 in all."""
    to_reward = ("algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_target=0.02")
    algorithm = made("algorithm=reinforce_pp", "algorithm.group_size=1", *to_reward)
    old, rewards = [np.zeros(2), np.full(2, -1.0)], np.array([1.0, 1.0])
    reference = [np.full(2, -0.5), np.full(2, -1.0)]
    masks = [np.ones(2, bool)] * 2
    lost = {}
    for coef in (None, 0.3):
        known = Known(rewards, np.arange(2), masks, old, reference, kl_coef=coef)
        lost[coef] = [one.tolist() for one in algorithm._penalties(known)]
    assert lost == {None: [[0.05, 0.05], [0, 0]], 0.3: [[0.15, 0.15], [0, 0]]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("algorithm.kl_target=0.1", "algorithm.kl_target=0.1 has no effect with algorithm.kl_coef"),
        (
            "algorithm.kl_coef=0.1 algorithm.kl_horizon=9",
            "algorithm.kl_horizon=9.0 has no effect with algorithm.kl_target=null",
        ),
        (
            "algorithm.kl_coef=0.1 algorithm.kl_target=0.1 algorithm.kl_horizon=25",
            "kl_horizon=25 is too short for steps of 128 samples.*set it above 25.6",
        ),
        ("algorithm=sft algorithm.kl_target=0.1", "algorithm.kl_target"),
    ],
)
def test_what_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        override(RunConfig(), settings.split())
