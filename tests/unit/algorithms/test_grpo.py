"""The policy loss, the KL estimators and GRPO's loss against values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lora_moe_rl.algorithms.base import Tokens, signal_of
from lora_moe_rl.algorithms.grpo import GRPO
from lora_moe_rl.algorithms.parts.kl import MISMATCH, k3, mismatch
from lora_moe_rl.algorithms.parts.policy_loss import clipped_policy_loss
from lora_moe_rl.algorithms.rloo import RLOO
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment

NAN = float("nan")


def tokens_of(logprobs, old, advantages, weights=None, reference=None) -> Tokens:
    n = len(logprobs)
    return Tokens(
        logprobs=logprobs,
        old=old,
        rollout=torch.full((n,), NAN),
        reference=reference,
        advantages=advantages,
        weights=torch.ones(n) if weights is None else weights,
        samples=torch.zeros(n, dtype=torch.long),
        versions=torch.zeros(n, dtype=torch.int32),
    )


def test_clipping_by_hand():
    ratio = torch.tensor([1.5, 1.1, 0.5, 0.5, 1.5])
    advantages = torch.tensor([1.0, 2.0, -2.0, 1.0, -1.0])
    old = torch.full((5,), -2.0)
    logprobs = (old + ratio.log()).requires_grad_()
    tokens = tokens_of(logprobs, old, advantages)
    loss, sums = clipped_policy_loss(tokens, clip_low=0.2, clip_high=0.3)
    # Too far up with a gain: 1.3. Within: 2.2. Too far down with a loss: -1.6. Moves against the
    # advantage are never clipped: 0.5 and -1.5.
    assert_close(loss, torch.tensor(-(1.3 + 2.2 - 1.6 + 0.5 - 1.5)))
    assert_close(sums["clipped_high"], torch.tensor(1.0))
    assert_close(sums["clipped_low"], torch.tensor(1.0))
    assert_close(sums["ratio"], torch.tensor(5.1))
    loss.backward()
    assert_close(logprobs.grad, torch.tensor([0.0, -2.2, 0.0, -0.5, 1.5]))


def test_on_policy_the_gradient_is_the_advantage():
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.4])
    loss, _ = clipped_policy_loss(tokens_of(logprobs, logprobs.detach(), advantages), 0.2, 0.2)
    loss.backward()
    assert_close(logprobs.grad, -advantages)


def test_k3_by_hand():
    logprobs = torch.tensor([0.5, 0.25]).log()
    reference = torch.tensor([0.25, 0.5]).log()
    # r = 0.5: 0.5 - 1 + ln 2; r = 2: 2 - 1 - ln 2.
    assert_close(k3(logprobs, reference), torch.tensor([math.log(2) - 0.5, 1 - math.log(2)]))


def test_k3_estimates_the_kl():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    exact = (p * (p / q).log()).sum()
    assert_close((p * k3(p.log(), q.log())).sum(), exact)


def test_mismatch_by_hand_and_only_where_masked():
    rollout = np.log(np.array([0.5, 0.5, 0.5], np.float32))
    trainer = np.array([math.log(0.25), math.log(0.5), NAN], np.float32)
    stats = mismatch(rollout, trainer, np.array([True, True, False]))
    assert stats["tokens"] == 2
    assert stats["kl"] == pytest.approx((math.log(2) - 0.5) / 2, rel=1e-6)
    assert stats["max_abs_logprob_diff"] == pytest.approx(math.log(2), rel=1e-6)
    assert stats["mean_abs_logprob_diff"] == pytest.approx(math.log(2) / 2, rel=1e-6)


def test_mismatch_counts_tokens_off_by_more_than_2x():
    rollout = np.log(np.array([0.5, 0.5, 0.2, 0.9], np.float32))
    trainer = np.log(np.array([0.26, 0.24, 0.5, 0.9], np.float32))
    assert mismatch(rollout, trainer, np.ones(4, bool))["off_by_2x"] == 0.5


def test_mismatch_of_rounding_errors_keeps_its_digits():
    rollout = np.zeros(4, np.float32)
    stats = mismatch(rollout, rollout + np.float32(1e-5), np.ones(4, bool))
    assert stats["kl"] == pytest.approx(5e-11, rel=1e-3)


def test_mismatch_shows_a_nan_and_survives_no_tokens():
    nan = mismatch(np.zeros(2), np.array([0.0, NAN]), np.ones(2, bool))
    assert math.isnan(nan["kl"]) and math.isnan(nan["max_abs_logprob_diff"])
    none = mismatch(np.zeros(2), np.zeros(2), np.zeros(2, bool))
    assert set(none) == {*MISMATCH, "tokens"} and not any(none.values())


def test_a_token_counts_with_its_weight():
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = torch.tensor([1.0, 0.25, 0.0])
    tokens = tokens_of(logprobs, logprobs.detach(), torch.tensor([1.0, 2.0, NAN]), weights)
    loss, _ = clipped_policy_loss(tokens, 0.2, 0.2)
    loss.backward()
    assert_close(logprobs.grad, torch.tensor([-1.0, -0.5, 0.0]))


def three_tokens(reference=None) -> tuple[torch.Tensor, Tokens]:
    """Two tokens that count (ratio 1, advantages 1 and -2) and one that does not and is all NaN."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old, advantages = torch.tensor([-1.0, -2.0, NAN]), torch.tensor([1.0, -2.0, NAN])
    weights = torch.tensor([1.0, 1.0, 0.0])
    return logprobs, tokens_of(logprobs, old, advantages, weights, reference)


def test_grpo_without_kl():
    logprobs, tokens = three_tokens()
    found = GRPO(GRPO.Settings()).loss(tokens)
    assert_close(found.total, torch.tensor(1.0))
    assert {key: value.item() for key, value in found.metrics.items()} == {
        "policy": 1, "kl": 0, "ratio": 2, "clipped_low": 0, "clipped_high": 0
    }  # fmt: skip
    found.total.backward()
    assert_close(logprobs.grad, torch.tensor([-1.0, 2.0, 0.0]))


def test_grpo_with_kl():
    reference = torch.tensor([-1.0 + math.log(2), -2.0, NAN])
    logprobs, tokens = three_tokens(reference)
    found = GRPO(GRPO.Settings(kl_coef=0.1)).loss(tokens)
    assert_close(found.metrics["kl"], torch.tensor(1 - math.log(2)))  # r = 2 and r = 1
    assert_close(found.total, torch.tensor(1.0 + 0.1 * (1 - math.log(2))))
    found.total.backward()
    # d/dlogp of k3 is 1 - r: -1 at r = 2.
    assert_close(logprobs.grad, torch.tensor([-1.0 - 0.1, 2.0, 0.0]))


@pytest.mark.parametrize(("kl_coef", "reference"), [(0.1, None), (0.0, torch.zeros(3))])
def test_grpo_wants_a_reference_exactly_when_it_is_used(kl_coef, reference):
    algorithm = GRPO(GRPO.Settings(kl_coef=kl_coef))
    assert algorithm.passes == ({"reference"} if kl_coef else set())
    with pytest.raises(ValueError, match=f"kl_coef={kl_coef}"):
        algorithm.loss(three_tokens(reference)[1])


@pytest.mark.parametrize("algorithm", [GRPO(GRPO.Settings()), RLOO(RLOO.Settings())])
def test_an_algorithm_returns_the_metrics_that_it_declares(algorithm):
    assert set(algorithm.loss(three_tokens()[1]).metrics) == set(algorithm.metrics)


def group_of(rewards, finish="stop", tool=0) -> Group:
    """Samples of three tokens; then `tool` tokens of a tool and one more of the policy."""
    samples = []
    for _ in rewards:
        segments = [Segment.given("user", [5, 6]), Segment.sampled([7, 8, 9], np.zeros(3), 0)]
        if tool:
            segments.append(Segment.given("tool", [3] * tool))
            segments.append(Segment.sampled([4], np.zeros(1), 1))
        samples.append(Sample(tuple(segments), finish, ""))
    return Group(Prompt(0, "", [5, 6]), samples, None, np.array(rewards, np.float32))


def test_a_signal_leaves_out_what_has_no_reward_and_what_the_policy_did_not_write():
    signal = signal_of(RLOO(RLOO.Settings()), group_of([1.0, 0.0, NAN], tool=2))
    assert [w.tolist() for w in signal.weights] == [[1, 1, 1, 0, 0, 1]] * 2 + [[0] * 6]
    assert [a[0] for a in signal.advantages] == [1, -1, 0]


def test_truncated_samples_are_left_out_when_that_is_asked():
    group = group_of([1.0, 0.0], finish="length")
    kept = signal_of(GRPO(GRPO.Settings()), group)
    left_out = signal_of(GRPO(GRPO.Settings(mask_truncated=True)), group)
    assert all(weight.all() for weight in kept.weights)
    assert not any(weight.any() for weight in left_out.weights)


def test_a_signal_of_another_shape_is_refused():
    class Short(RLOO):
        def signal(self, group):
            signal = super().signal(group)
            return type(signal)(signal.advantages, [w[1:] for w in signal.weights])

    with pytest.raises(ValueError, match="Short.signal returned weights of shapes"):
        signal_of(Short(RLOO.Settings()), group_of([1.0, 0.0]))
