"""Losses, corrections and presets against values worked out by hand; see test_oracles.py too."""

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from packed_tokens import mean_over, tokens_of
from torch.testing import assert_close

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.aggregation import aggregate
from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient
from lora_moe_rl.bench.algorithms import presets
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import RewardError

NAN = float("nan")


def made(*settings: str):
    return algorithms.make(override(RunConfig(), settings))


def test_clipping_by_hand():
    ratio = torch.tensor([1.5, 1.1, 0.5, 0.5, 1.5])
    advantages = torch.tensor([1.0, 2.0, -1.0, 1.0, -1.0])
    old = torch.full((5,), -2.0)
    logprobs = (old + ratio.log()).requires_grad_()
    found = made("algorithm.clip_high=0.3").loss(tokens_of(logprobs, old, advantages))
    # Too far up with a gain: 1.3. Within: 2.2. Too far down with a loss: -0.8. Moves against the
    # advantage are never clipped: 0.5 and -1.5.
    assert_close(found.values, -torch.tensor([1.3, 2.2, -0.8, 0.5, -1.5]))
    assert found.metrics["clipped_high"].tolist() == [1, 0, 0, 0, 0]
    assert found.metrics["clipped_low"].tolist() == [0, 0, 1, 0, 0]
    assert_close(found.metrics["ratio"], ratio)
    found.values.sum().backward()
    assert_close(logprobs.grad, torch.tensor([0.0, -2.2, 0.0, -0.5, 1.5]))


def test_on_policy_the_gradient_is_the_advantage():
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.4])
    made().loss(tokens_of(logprobs, logprobs.detach(), advantages)).values.sum().backward()
    assert_close(logprobs.grad, -advantages)


def three_tokens(reference=None):
    """Two tokens that count (ratio 1, advantages 1 and -2) and one that does not and is all NaN."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old, advantages = torch.tensor([-1.0, -2.0, NAN]), torch.tensor([1.0, -2.0, NAN])
    mask = torch.tensor([True, True, False])
    return logprobs, tokens_of(logprobs, old, advantages, mask, reference=reference)


def test_the_kl_to_the_base_comes_on_top():
    reference = torch.tensor([-1.0 + math.log(2), -2.0, NAN])
    logprobs, tokens = three_tokens(reference)
    found = made("algorithm.kl_coef=0.1").loss(tokens)
    kl = torch.tensor([1 - math.log(2), 0.0, 0.0])  # r = 2 and r = 1
    assert_close(found.metrics["kl"], kl)
    assert_close(found.values, torch.tensor([-1.0, 2.0, 0.0]) + 0.1 * kl)
    found.values.sum().backward()
    # d/dlogp of k3 is 1 - r: -1 at r = 2.
    assert_close(logprobs.grad, torch.tensor([-1.0 - 0.1, 2.0, 0.0]))


def test_a_kl_in_the_reward_is_not_in_the_loss_and_is_of_the_policy_before():
    reference = torch.tensor([-1.0 + math.log(2), -2.0, NAN])
    logprobs, tokens = three_tokens(reference)
    with torch.no_grad():
        logprobs += 0.25
    tokens = replace(tokens, logprobs=logprobs.where(tokens.mask, 0.0))
    found = made("algorithm=rloo", "algorithm.kl_coef=0.1").loss(tokens)
    without = made("algorithm=rloo").loss(replace(tokens, reference=None))
    assert_close(found.values, without.values)
    assert_close(found.metrics["kl"], torch.tensor([-math.log(2), 0.0, 0.0]))


@pytest.mark.parametrize(("kl_coef", "reference"), [(0.1, None), (0.0, torch.zeros(3))])
def test_a_reference_is_wanted_exactly_when_it_is_used(kl_coef, reference):
    algorithm = made(f"algorithm.kl_coef={kl_coef}")
    assert algorithm.passes == ({"reference"} if kl_coef else set())
    with pytest.raises(ValueError, match=f"kl_coef={kl_coef}"):
        algorithm.loss(three_tokens(reference)[1])


@pytest.mark.parametrize("correction", ["none", "token_truncate"])
@pytest.mark.parametrize("name", presets())
def test_a_preset_returns_the_metrics_that_it_declares_and_is_finite(name, correction):
    longer = "trainer.steps=100"  # than the warm-up of any
    settings = [f"algorithm.correction={correction}"]
    if correction != "none":
        settings.append("algorithm.anchor=trainer")
    algorithm = made(f"algorithm={name}", *settings, longer)
    logprobs, tokens = three_tokens()
    found = algorithm.loss(replace(tokens, rewards=tokens.advantages, step_mean=0.5))
    assert set(found.metrics) == set(algorithm.metrics)
    found.values.sum().backward()
    assert torch.isfinite(logprobs.grad).all() and logprobs.grad[2] == 0
    assert (logprobs.grad[:2].sign() == torch.tensor([-1.0, 1.0])).all()


def test_the_geometric_mean_of_clipped_ratios_by_hand():
    """verl's geo_mean is -A exp(mean of clipped log ratios), the mean over samples. Bounds of 0.3:
    of A = 2 and log ratios 0.5 and -0.5 the first is 0.3 (too far up), which makes exp(-0.1); of
    A = -1 and log ratios 0.5, -0.5 and 0.1 the second is -0.3, which makes exp(0.1)."""
    log_ratio = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.1, 7.0], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, -1.0, -1.0, -1.0, 9.0], dtype=torch.float64)
    samples, mask = torch.tensor([0, 0, 1, 1, 1, 1]), torch.tensor([True] * 5 + [False])
    old = torch.full((6,), -1.0, dtype=torch.float64)
    logprobs = (old + log_ratio).requires_grad_()
    tokens = tokens_of(logprobs, old, advantages, mask, samples=samples)
    found = made(
        "algorithm.loss=gmpo", "algorithm.log_clip_low=0.3", "algorithm.log_clip_high=0.3"
    ).loss(tokens)
    scales = aggregate(
        "seq-mean-token-mean", np.array([2, 3]), np.array([0, 0]), np.array([1, 1]), 10
    )
    loss = mean_over(found.values, tokens, scales)
    first, second = -2 * math.exp(-0.1), math.exp(0.1)
    assert loss.item() == pytest.approx((first + second) / 2, rel=1e-7)
    loss.backward()
    # A token's share of its sample's loss, but for those that were clipped.
    expected = [0, first / 2, second / 3, 0, second / 3, 0]
    assert logprobs.grad is not None
    assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float64) / 2)
    assert found.metrics["clipped_high"].tolist() == [1, 0, 0, 0, 0, 0]
    assert found.metrics["clipped_low"].tolist() == [0, 0, 0, 1, 0, 0]
    plain = replace(tokens, logprobs=logprobs.detach().where(mask, 0.0))
    assert made("algorithm.loss=gmpo").settings.log_clip_high == 0.4
    wide = made(
        "algorithm.loss=gmpo", "algorithm.log_clip_low=9", "algorithm.log_clip_high=9"
    ).loss(plain)
    assert_close(wide.values[:2], -2 * torch.ones(2, dtype=torch.float64))


def test_published_vectors():
    """Published test vectors: ratios 0.5, 1 and 1.5."""
    advantages = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    old = torch.full((3,), -1.0, dtype=torch.float64)
    new = torch.tensor([-1.69315, -1.0, -0.59453], dtype=torch.float64)
    rollout = torch.tensor([-0.5, -1.5, -0.8], dtype=torch.float64)
    tokens = tokens_of(new, old, advantages, rollout=rollout)
    # Published as CISPO, bounds 0.8 and 1.2.
    cispo = ("algorithm.loss=cispo", "algorithm.ratio_min=0.8", "algorithm.ratio_max=1.2")
    for expected, settings in (
        (-0.6333, ()),
        (-0.6057, ("algorithm.loss=gspo",)),
        (-0.2065, ("algorithm.correction=tis",)),
        (0.5938, cispo),
    ):
        mean = made(*settings).loss(tokens).values.mean().item()
        assert mean == pytest.approx(expected, abs=6e-5), settings
    # Published with a bound of 0.8 too, which a config refuses: it is below 1.
    narrow = made("algorithm.correction=tis")
    bounded = narrow._correction.settings.model_copy(update={"correction_max": 0.8})
    narrow._correction.settings = bounded
    assert narrow.loss(tokens).values.mean().item() == pytest.approx(-0.4744, abs=6e-5)


def test_published_dual_clip():
    advantages = torch.tensor([1.0, -1.0, -4.0], dtype=torch.float64)
    old = torch.tensor([-1.0, -1.0, -3.0], dtype=torch.float64)
    new = torch.tensor([-1.69315, -1.0, -0.69741], dtype=torch.float64)
    found = made("algorithm.dual_clip=3").loss(tokens_of(new, old, advantages))
    assert found.values.sum().item() == pytest.approx(12.5, abs=1e-4)


def test_weights_by_hand():
    """Ratios trainer to engine of 0.4, 0.8 and 6; a fourth token is of another sample."""
    old = torch.zeros(4, dtype=torch.float64)
    rollout = -torch.tensor([0.4, 0.8, 6.0, 1.5], dtype=torch.float64).log()
    samples = torch.tensor([0, 0, 0, 1])
    tokens = tokens_of(old, old, torch.ones(4), rollout=rollout, samples=samples)
    for name, expected in {
        "tis": [0.4, 0.8, 2.0, 1.5],
        "icepop": [0.0, 0.8, 0.0, 1.5],
        "decoupled_seq_is": [1.92, 1.92, 1.92, 1.5],
        "mis": [1.92, 1.92, 1.92, 1.5],
    }.items():
        algorithm = made(f"algorithm.correction={name}")
        weights, metrics = algorithm._correction.weights(tokens.old - tokens.rollout, tokens)
        np.testing.assert_allclose(weights, expected, rtol=1e-12)
        assert metrics["weight_bounded"].sum() == sum(
            abs(w - r) > 1e-9 for w, r in zip(expected, metrics["weight_largest"].tolist())
        )


def test_of_weights_that_are_all_0_deviation_and_sample_size_are_0():
    summary = made("algorithm.correction=mis").summary(
        {"loss/weight": 0.0, "loss/weight_squared": 0.0}
    )
    assert summary["loss/weight_std"] == summary["loss/weight_ess"] == 0


def test_several_rejections_keep_what_all_of_them_keep():
    """Ratios of 1.05 and 0.9 in one sample, 3 in another, 1 in a third."""
    old = torch.zeros(4, dtype=torch.float64)
    rollout = -torch.tensor([1.05, 0.9, 3.0, 1.0], dtype=torch.float64).log()
    samples = torch.tensor([0, 0, 1, 2])
    tokens = tokens_of(old, old, torch.ones(4), rollout=rollout, samples=samples)
    settings = ("algorithm.rejection=tokens,veto", "algorithm.rejection_max=4,1.5")
    narrow = ("algorithm.rejection_min=0.95,null",)
    assert made(*settings).keep(tokens).tolist() == [True, True, False, True]
    assert made(*settings, *narrow).keep(tokens).tolist() == [True, False, False, True]


def test_a_far_sample_leaves_as_a_whole_or_stays_whatever_its_tokens_advantages_are():
    """Four samples: far with a negative sum, far with a positive one, near with a negative one, far
    and nothing but negative, of one token that does not count."""
    advantages = torch.tensor([1.0, -3.0, 1.0, -1.0, 3.0, -1.0, 1.0, -3.0, -1.0, 5.0])
    far = torch.tensor([True] * 6 + [False] * 2 + [True] * 2)
    samples = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    mask = torch.tensor([True] * 9 + [False])
    old = torch.full((10,), -2.0)
    tokens = tokens_of(old, old, advantages, mask, old + 0.5 * far, samples=samples)
    algorithm = made("algorithm.rejection=off_policy", "algorithm.rejection_max=0.1")
    found = algorithm.loss(tokens)
    kept = [False] * 4 + [True] * 2 + [True] * 2 + [False] + [False]
    assert found.metrics["rejected_share"].tolist() == [float(not one) for one in kept]
    assert (found.values != 0).tolist() == kept
    assert (
        not algorithm.rejects
        and algorithms.passes(RunConfig(algorithm=algorithm.settings)) == set()
    )


def test_a_preset_may_have_several_rejections_with_bounds_of_its_own():
    class Twice(PolicyGradient):
        defaults: ClassVar = {
            "rejection": "sequence_mean,veto",
            "rejection_max": (1.5, 3.0),
            "clip_low": 0.1,
        }

    algorithm = Twice(Twice.read({}), 20)
    assert [one.settings.rejection_max for one in algorithm._rejections] == [1.5, 3.0]
    assert algorithm.settings.clip_low == 0.1
    once = Twice(Twice.read({"rejection": "veto", "rejection_max": 5.0}), 20)
    assert [one.settings.rejection_max for one in once._rejections] == [5.0]


def test_settings_of_several_rejections_survive_being_saved():
    config = override(
        RunConfig(),
        ["algorithm.rejection=sequence_mean,veto,off_policy", "algorithm.rejection_max=1.1,2,0.01"],
    )
    assert config.algorithm.model_dump()["rejection_max"] == (1.1, 2, 0.01)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("settings", "passes"),
    [((), set()), (("algorithm.correction_normalize=true",), {"old"})],
)
def test_a_mean_over_the_step_wants_a_forward_before_the_update(settings, passes):
    config = override(RunConfig(), ["algorithm.correction=tis", *settings])
    assert algorithms.passes(config) == passes


def test_weights_without_their_mean_are_refused():
    algorithm = made("algorithm.correction=tis", "algorithm.correction_normalize=true")
    with pytest.raises(ValueError, match="the step's mean is missing"):
        algorithm.loss(three_tokens()[1])


def test_a_ratio_against_the_engine():
    """anchor=rollout: the clip is of new against engine, and the old logprobs do not count."""
    logprobs = torch.log(torch.tensor([0.3, 0.3]))
    rollout = torch.log(torch.tensor([0.2, 0.3]))
    tokens = tokens_of(logprobs, logprobs + 5, torch.ones(2), rollout=rollout)
    found = made("algorithm.correction=bypass_ppo_clip").loss(tokens)
    assert_close(found.values, -torch.tensor([1.2, 1.0]))
    found = made("algorithm.correction=bypass_pg_token_icepop").loss(tokens)
    assert_close(found.values, -torch.tensor([1.5, 1.0]) * logprobs)


def test_reinforce_takes_several_updates_when_it_weighs_by_the_policy_that_is_updated():
    """A token that has become twice as likely as it was sampled has twice the gradient."""
    settings = ("algorithm.anchor=rollout", "algorithm.correction=tis", "algorithm.epochs=2")
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -1.0 - math.log(2)])
    tokens = tokens_of(logprobs, logprobs.detach(), torch.ones(2), rollout=rollout)
    made("algorithm.loss=reinforce", *settings).loss(tokens).values.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-1.0, -2.0]))


@pytest.mark.parametrize("name", ["token_truncate", "sequence_truncate", "sequence_mask"])
def test_a_weight_may_be_bounded_at_one(name):
    """As IMPALA's truncation is."""
    assert made(f"algorithm.correction={name}", "algorithm.correction_max=1") is not None


def test_a_negative_reward_has_no_max_rl_advantage():
    with pytest.raises(RewardError, match="takes no negative rewards; one is -1"):
        made("algorithm=max_rl")._advantage.of_group(np.array([1.0, -1.0]), np.ones(2))


def test_the_entropy_is_taken_from_the_loss_of_each_token_and_no_weight_touches_it():
    _, tokens = three_tokens()
    entropy = torch.tensor([0.5, 2.0, 9.0], requires_grad=True)
    tokens = replace(tokens, entropy=entropy.where(tokens.mask, 0), rollout=tokens.old - 3)
    with_bonus = made("algorithm.entropy_coef=0.1", "algorithm.correction=tis")
    found, plain = with_bonus.loss(tokens), made("algorithm.correction=tis").loss(tokens)
    assert with_bonus.trains_entropy and not made().trains_entropy
    assert_close(found.values - plain.values, torch.tensor([-0.05, -0.2, 0.0]))
    assert_close(found.metrics["policy"], plain.metrics["policy"])
    found.values.sum().backward()
    assert_close(entropy.grad, torch.tensor([-0.1, -0.1, 0.0]))
    with pytest.raises(ValueError, match="algorithm.entropy_coef wants the tokens' entropy"):
        with_bonus.loss(replace(tokens, entropy=None))
