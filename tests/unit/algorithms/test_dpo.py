"""Direct preference optimisation against its formula as TRL writes it, by torch's autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packed_tokens import tokens_of

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.base import Known
from lora_moe_rl.algorithms.parts.aggregation import aggregate
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError

LENGTHS = (3, 5, 1, 2, 4, 4)
CHOSEN, REJECTED = [0, 3, 4], [1, 2, 5]  # the second pair has its chosen answer last
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
GROUPS = np.array([0, 0, 1, 1, 2, 2])


def dpo(*settings: str):
    return algorithms.make(override(RunConfig(), ["algorithm=dpo", *settings]))


def logprobs(seed: int, size: float = 3.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [-size * rng.random(n) for n in LENGTHS]


def known(seed: int = 0, size: float = 3.0, **changes) -> Known:
    masks = [np.ones(n, bool) for n in LENGTHS]
    parts = {"old": logprobs(seed, size), "reference": logprobs(seed + 1, size)} | changes
    return Known(REWARDS, GROUPS, masks, **parts)


def as_trl(old, reference, beta: float, smoothing: float, kind: str = "sigmoid"):
    """DPOTrainer's loss_type on summed logprobs: (loss, chosen and rejected rewards). Its sigmoid
    takes no smoothing, which is cDPO's."""
    sums = torch.stack([one.sum() for one in old])
    base = torch.stack([one.sum() for one in reference])
    chosen, rejected = sums[CHOSEN] - base[CHOSEN], sums[REJECTED] - base[REJECTED]
    delta = chosen - rejected
    clean, flipped = -F.logsigmoid(beta * delta), -F.logsigmoid(-beta * delta)
    tokens = torch.tensor(LENGTHS, dtype=torch.float64)
    of_means = chosen / tokens[CHOSEN] - rejected / tokens[REJECTED]
    losses = {
        "sigmoid": clean * (1 - smoothing) + flipped * smoothing,
        "robust": (clean * (1 - smoothing) - flipped * smoothing) / (1 - 2 * smoothing),
        "hinge": torch.relu(1 - beta * delta),
        "ipo": (of_means - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": -F.logsigmoid(beta * of_means),
    }[kind]
    return losses.mean(), beta * chosen.detach(), beta * rejected.detach()


@pytest.mark.parametrize("size", [0.5, 3.0, 400.0])  # margins to 100, where sigmoid is 0 or 1
@pytest.mark.parametrize(
    ("beta", "smoothing", "kind"),
    [
        (0.1, 0.0, "sigmoid"),
        (0.5, 0.2, "sigmoid"),
        (0.5, 0.2, "robust"),
        (0.3, 0.0, "hinge"),
        (0.1, 0.0, "ipo"),
        (0.7, 0.0, "sigmoid_norm"),
    ],
)
def test_loss_metrics_and_gradient_are_those_of_the_formula(beta, smoothing, kind, size):
    algorithm = dpo(
        f"algorithm.beta={beta}",
        f"algorithm.label_smoothing={smoothing}",
        f"algorithm.pair_loss={kind}",
    )
    step = known(size=size)
    old = [torch.from_numpy(one).requires_grad_() for one in step.old]
    reference = [torch.from_numpy(one) for one in step.reference]
    loss, chosen, rejected = as_trl(old, reference, beta, smoothing, kind)
    wanted = torch.cat(torch.autograd.grad(loss, old)).numpy()

    found = algorithm.revised_metrics(step)
    assert found["loss/dpo"] == pytest.approx(loss.item(), rel=1e-12)
    assert found["rewards/chosen"] == pytest.approx(chosen.mean().item())
    assert found["rewards/rejected"] == pytest.approx(rejected.mean().item())
    assert found["rewards/margins"] == pytest.approx((chosen - rejected).mean().item())
    assert found["rewards/accuracies"] == (chosen > rejected).double().mean().item()

    ours = torch.from_numpy(np.concatenate(step.old)).requires_grad_()
    advantages = torch.from_numpy(np.concatenate(algorithm.revised(step)))
    values = algorithm.loss(tokens_of(ours, ours.detach(), advantages)).values
    scales = aggregate(
        algorithm.settings.aggregation, np.array(LENGTHS), GROUPS, np.ones(len(LENGTHS), int), 100
    )
    per_token = np.repeat(scales.of_sample, LENGTHS)
    (gradient,) = torch.autograd.grad(
        (values * torch.from_numpy(per_token)).sum() / scales.divisor, ours
    )
    np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-12, atol=1e-300)


def test_at_the_base_every_pair_is_undecided():
    step = known(reference=logprobs(0))
    found = dpo().revised_metrics(step)
    assert found["loss/dpo"] == pytest.approx(np.log(2))
    assert found["rewards/margins"] == 0 and found["rewards/accuracies"] == 0


def test_tokens_that_are_not_the_answers_count_nowhere():
    step = known()
    step.masks[0][1] = False
    elsewhere = known(old=[one.copy() for one in step.old])
    elsewhere.masks[0][1] = False
    elsewhere.old[0][1] = -50.0
    assert dpo().revised_metrics(step) == dpo().revised_metrics(elsewhere)
    assert dpo().revised(step)[0][1] == 0 and dpo().revised(step)[0][0] != 0


@pytest.mark.parametrize("rewards", [[1, 1, 0, 1, 1, 0], [np.nan, 0, 0, 1, 1, 0]])
def test_a_group_without_a_better_and_a_worse_answer_is_an_error(rewards):
    step = Known(np.array(rewards, float), GROUPS, known().masks, logprobs(0), logprobs(1))
    with pytest.raises(ValueError, match="pairs of a larger and a smaller reward, and group 0"):
        dpo().revised(step)
    triple = Known(REWARDS, np.zeros(6, int), known().masks, logprobs(0), logprobs(1))
    with pytest.raises(ValueError, match="pairs"):
        dpo().revised(triple)


def test_a_forward_that_was_not_made_is_an_error():
    with pytest.raises(ValueError, match="needs the forward 'reference'"):
        dpo().revised(known(reference=None))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.mini_batches=2", "algorithm.mini_batches=2 make several updates a step"),
        ("algorithm.epochs=3", "algorithm.epochs=3 and .* several updates a step"),
        ("algorithm.aggregation=token-mean", "algorithm.aggregation=token-mean has no meaning"),
        ("algorithm.beta=0", "algorithm.beta=0 must be greater than 0"),
        ("algorithm.group_size=4", "algorithm.group_size=4 must be at most 2"),
        (
            "algorithm.pair_loss=ipo algorithm.label_smoothing=0.1",
            "label_smoothing=0.1 has no effect with algorithm.pair_loss=ipo: it applies only to",
        ),
    ],
)
def test_what_would_not_be_dpo_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        dpo(*setting.split())


def test_it_asks_for_the_policy_and_the_base_before_the_update():
    config = override(RunConfig(), ["algorithm=dpo"])
    assert algorithms.passes(config) == {"old", "reference"}
