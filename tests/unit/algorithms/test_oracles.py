"""Advantages, losses, corrections and aggregation against verl's and TRL's, in float64.

The numbers in oracles.json are theirs (tests/oracles/record.py, `make oracles`). Where this project
wants something else the difference is said here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_tokens import mean_over, tokens_of

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.base import Known
from lora_moe_rl.algorithms.parts.aggregation import aggregate
from lora_moe_rl.algorithms.parts.kl import estimate, mismatch, mismatch_of_samples
from lora_moe_rl.algorithms.parts.reweight import weights
from lora_moe_rl.algorithms.parts.selection import StepTokens
from lora_moe_rl.config import RunConfig

BATCHES = json.loads((Path(__file__).parent / "oracles.json").read_text())["batches"]
LONGEST = len(BATCHES[0]["mask"][0])
CLOSE = {"rtol": 1e-6, "atol": 1e-9}


def made(**settings):
    """An algorithm with responses of at most LONGEST tokens."""
    return algorithms.make(RunConfig(algorithm=settings, rollout={"max_response_tokens": LONGEST}))


def flat(batch, name: str) -> torch.Tensor:
    return torch.tensor(batch[name], dtype=torch.float64).reshape(-1)


def packed(batch, **more):
    mask = torch.tensor(batch["mask"]).reshape(-1)
    samples = torch.arange(len(batch["mask"])).repeat_interleave(LONGEST)
    values = {name: flat(batch, name) for name in ("old", "advantages", "rollout")} | more
    logprobs = values.pop("logprobs", flat(batch, "new"))
    return tokens_of(logprobs, mask=mask, samples=samples, **values)


def assert_close(found, expected, mask=None) -> None:
    found = np.asarray(found, np.float64).reshape(-1)
    expected = np.asarray(expected, np.float64).reshape(-1)
    if mask is not None:
        chosen = np.asarray(mask).reshape(-1)
        found, expected = found[chosen], expected[chosen]
    np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"advantage": "grpo"}),
        ("grpo_without_std", {"advantage": "grpo", "normalize_std": False}),
        ("rloo", {"advantage": "rloo"}),
        ("opo", {"advantage": "opo"}),
        ("reinforce_pp", {"advantage": "reinforce_pp", "gamma": 0.9}),
        ("reinforce_pp_baseline", {"advantage": "reinforce_pp_baseline"}),
        ("grpo_passk", {"advantage": "grpo_passk"}),
        ("grpo_passk_without_std", {"advantage": "grpo_passk", "normalize_std": False}),
    ],
)
def test_advantages_are_verls(batch, name, settings):
    """A sample that is alone in its group has nothing to compare with and no advantage here; verl
    gives it its whole reward. That one is not compared."""
    masks, groups = np.array(batch["mask"]), np.array(batch["groups"])
    alone = np.bincount(groups)[groups] == 1
    step = Rewarded(np.array(batch["rewards"]), groups, list(masks))
    found = np.array(made(**settings)._advantage.of_step(step))
    compared = masks if name.startswith("reinforce") else masks & ~alone[:, None]
    assert_close(found, batch["advantages_of"][name], compared)


@pytest.mark.parametrize("batch", BATCHES)
def test_advantages_against_a_greedy_sample_are_verls(batch):
    """Whose reward is any number: that of the batch's second function."""
    masks, rewards = np.array(batch["mask"]), np.array(batch["rewards"])
    step = Rewarded(rewards, np.array(batch["groups"]), masks, baselines=np.array(batch["second"]))
    found = np.array(made(advantage="remax")._advantage.of_step(step))
    assert_close(found, batch["advantages_of"]["remax"], masks)


@pytest.mark.parametrize("batch", BATCHES)
def test_advantages_of_gpg_are_verls_but_for_the_share_that_they_are_divided_by(batch):
    """Of the samples whose groups tell them apart, as the paper and its authors' code have it; verl
    takes the share of the samples whose reward is not 0."""
    masks, groups = np.array(batch["mask"]), np.array(batch["groups"])
    rewards = np.array(batch["rewards"])
    found = np.array(made(advantage="gpg")._advantage.of_step(Rewarded(rewards, groups, masks)))
    tells = np.array([np.ptp(rewards[groups == group]) > 0 for group in groups])
    assert 0 < tells.mean() < 1 and 0 < np.mean(rewards != 0) < 1
    expected = np.array(batch["advantages_of"]["gpg"]) * np.mean(rewards != 0)
    alone = np.bincount(groups)[groups] == 1
    assert_close(found * tells.mean(), expected, masks & ~alone[:, None])


@pytest.mark.parametrize("batch", BATCHES)
def test_advantages_of_two_reward_functions_are_verls(batch):
    """In float32, in which verl takes them. Of a sample alone verl was told rewards of 0."""
    masks, groups = np.array(batch["mask"]), np.array(batch["groups"])
    parts, weights = [np.array(batch[name]) for name in ("rewards", "second")], [1.0, 0.25]
    total = parts[0] + 0.25 * parts[1]
    step = Rewarded(total, groups, list(masks), by_function=parts, weights=weights)
    found = np.array(made(advantage="gdpo")._advantage.of_step(step))
    expected = np.array(batch["advantages_of"]["gdpo"])
    np.testing.assert_allclose(found[masks], expected[masks], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline"])
def test_advantages_of_rewards_less_the_kl_are_verls(batch, name, kind):
    """But for groups of equal rewards with `grpo`, where verl divides by the deviation of the KL
    alone, and nothing is divided here: test_advantages.py has these."""
    masks, groups = np.array(batch["mask"]), np.array(batch["groups"])
    more = {"gamma": 0.9} if name == "reinforce_pp" else {}
    algorithm = made(advantage=name, kl_in="reward", kl_coef=0.2, kl_estimator=kind, **more)
    known = Known(
        np.array(batch["rewards"]),
        groups,
        list(masks),
        list(np.array(batch["old"])),
        list(np.array(batch["reference"])),
    )
    alone = np.bincount(groups)[groups] == 1
    compared = masks if name.startswith("reinforce") else masks & ~alone[:, None]
    if name == "grpo":
        equal = np.array([np.ptp(known.rewards[groups == group]) == 0 for group in groups])
        assert (equal & ~alone).any() and not (equal | alone).all()
        compared = compared & ~equal[:, None]
    assert_close(algorithm.revised(known), batch["revised"][f"{name} {kind}"], compared)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("how", ["pow", "max_min", "max_random"])
def test_what_samples_are_drawn_by_is_verls(batch, how):
    """Of PF-PPO; verl has some of them in float32."""
    found = weights(np.array(batch["rewards"]), how, 1.5)
    np.testing.assert_allclose(found, batch["reweights"][how], rtol=1e-6)
    assert found.max() > 2 * found.min()


SETTINGS = {
    "ppo_clip": {"loss": "ppo_clip", "clip_high": 0.28},
    "dual_clip": {"loss": "ppo_clip", "dual_clip": 3.0},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"loss": "cispo", "ratio_min": 0.1, "ratio_max": 1.5},
    "sapo": {"loss": "sapo"},
    "dppo_tv": {"loss": "dppo", "divergence_max": 0.1},
    "dppo_kl": {"loss": "dppo", "divergence": "kl", "divergence_max": 0.05},
    "gmpo": {"loss": "gmpo", "log_clip_low": 0.1, "log_clip_high": 0.15},
    "dro": {"loss": "dro", "dro_beta": 0.3, "epochs": 2},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", list(BATCHES[0]["losses"]))
def test_losses_and_their_gradients_are_verls(batch, case):
    name, how = case.split()
    logprobs = flat(batch, "new").requires_grad_()
    tokens = packed(batch, logprobs=logprobs)
    kept = np.array(batch["mask"]).sum(axis=1)
    scales = aggregate(how, kept, np.array(batch["groups"]), np.ones_like(kept), LONGEST)
    of_tokens = made(**SETTINGS[name]).loss(tokens)
    found = mean_over(of_tokens.values, tokens, scales)
    found.backward()
    expected = batch["losses"][case]
    assert_close(found.item(), expected["loss"])
    assert_close(logprobs.grad, expected["gradient"])
    if name == "dual_clip":
        shares = {n: values[tokens.mask].mean() for n, values in of_tokens.metrics.items()}
        assert_close(shares["clipped_low"] + shares["clipped_high"], expected["pg_clipfrac"])
        assert_close(shares["clipped_dual"], expected["pg_clipfrac_lower"])


def selected_in(algorithm, tokens):
    """The tokens, and what is selected of them; where tokens are drawn it is the last ones. Of the
    policy in the loss, and not of one before the update: theirs is made in the loss."""
    mask = tokens.mask
    names = ("logprobs", "old", "rollout", "advantages")
    inside = {name: getattr(tokens, name)[mask].detach().numpy() for name in names}
    lots = np.linspace(1, 0, int(mask.sum()))
    entropy = None if tokens.entropy is None else tokens.entropy[mask].detach().numpy()
    found = algorithm.select(StepTokens(**inside, lots=lots, entropy=entropy))
    selected = torch.zeros_like(tokens.logprobs)
    selected[mask] = selected.new_tensor(found.tokens)
    return replace(tokens, selected=selected), found


BY_COVARIANCE = {
    "clip_cov": {
        "loss": "clip_cov",
        "clip_high": 0.28,
        "clip_cov_ratio": 0.1,
        "clip_cov_lb": 0.1,
        "clip_cov_ub": 0.6,
    },
    "kl_cov": {"loss": "kl_cov", "kl_cov_ratio": 0.15, "ppo_kl_coef": 0.3, "epochs": 2},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", list(BATCHES[0]["covariance_losses"]))
def test_losses_by_a_covariance_over_all_tokens_are_verls(batch, case):
    """The first token's ratio is not an extreme one: verl bounds none of them here."""
    name, how = case.split()
    algorithm = made(**BY_COVARIANCE[name])
    new = torch.tensor(batch["new"], dtype=torch.float64)
    new[0, 0] = batch["old"][0][0] + 0.5
    logprobs = new.reshape(-1).requires_grad_()
    tokens, selection = selected_in(algorithm, packed(batch, logprobs=logprobs))
    kept = np.array(batch["mask"]).sum(axis=1)
    scales = aggregate(how, kept, np.array(batch["groups"]), np.ones_like(kept), LONGEST)
    of_tokens = algorithm.loss(tokens)
    found = mean_over(of_tokens.values, tokens, scales)
    found.backward()
    expected = batch["covariance_losses"][case]
    assert_close(logprobs.grad, expected["gradient"])
    assert_close(found.item(), expected["loss"])
    means = {n: values[tokens.mask].mean().item() for n, values in of_tokens.metrics.items()}
    if name == "clip_cov":
        assert_close(means["selected"], expected["pg_clipfrac"])
        assert selection.metrics["covariance_within"] > means["selected"] > 0
    else:
        assert_close(means["log_ratio_size"], expected["ppo_kl"])


NARROW = {"clip_low": 0.02, "clip_high": 0.05}
TIS = {"correction": "tis", "correction_max": 1.3}
KL = {"kl_coef": 0.3}
SAMPLES, SUMS = {"aggregation": "seq-mean-token-mean"}, {"aggregation": "seq-mean-token-sum"}
OFF_POLICY = {"rejection": "off_policy", "rejection_max": 0.05}
OF_TRL = {
    "grpo": {"clip_high": 0.28} | SAMPLES,
    "dapo": {"clip_high": 0.28},
    "dr_grpo": {"name": "dr_grpo"},
    "delta": {"dual_clip": 1.3},
    "cispo": {"loss": "cispo", "ratio_max": 1.4},
    "sapo": {"name": "sapo"},
    "gspo": {"name": "gspo"} | NARROW,
    "luspo": {"loss": "gspo"} | NARROW | SUMS,
    "vespo": {"loss": "vespo"},
    "vespo_engine": {"loss": "vespo", "anchor": "rollout"},
    "tis": TIS,
    "kl": KL,
    "kl_weighted": KL | {"kl_weighted": True},
    "kl_weighted_tis": KL | TIS | {"kl_weighted": True},
    "off_policy": OFF_POLICY,
    "off_policy_kl_tis": KL | TIS | SAMPLES | OFF_POLICY,
    "high_entropy": {"top_entropy_quantile": 0.3},
    "high_entropy_grpo": {"top_entropy_quantile": 0.3} | SAMPLES,
    "high_entropy_dr_grpo": {"name": "dr_grpo", "top_entropy_quantile": 0.25},
    "high_entropy_all": KL | TIS | {"top_entropy_quantile": 0.4, "entropy_coef": 0.2},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", list(BATCHES[0]["trl_losses"]))
def test_losses_and_their_gradients_are_trls(batch, case):
    """With one advantage a sample, as TRL has it; the first token's ratio is not an extreme one.
    TRL's entropy bonus is the mean over the tokens that are selected; here it is divided by what
    the rest of the loss is."""
    algorithm = made(**OF_TRL[case])
    new = torch.tensor(batch["new"], dtype=torch.float64)
    new[0, 0] = batch["old"][0][0] + 0.5
    logprobs = new.reshape(-1).requires_grad_()
    first = torch.tensor(batch["advantages"], dtype=torch.float64)[:, :1]
    more = {"reference": flat(batch, "reference")} if algorithm.settings.kl_coef else {}
    tokens = packed(
        batch, logprobs=logprobs, advantages=first.expand(-1, LONGEST).reshape(-1), **more
    )
    entropy = flat(batch, "entropy").requires_grad_()
    if algorithm.selects:
        tokens = replace(tokens, entropy=entropy.where(tokens.mask, 0))
        tokens, _ = selected_in(algorithm, tokens)
        assert 0 < tokens.selected.sum() < tokens.mask.sum() / 2
    kept = np.array(batch["mask"]).sum(axis=1)
    how = algorithm.settings.aggregation
    scales = aggregate(how, kept, np.array(batch["groups"]), np.ones_like(kept), LONGEST)
    found = mean_over(algorithm.loss(tokens).values, tokens, scales)
    found.backward()
    expected = batch["trl_losses"][case]
    assert_close(logprobs.grad, expected["gradient"])
    bonus = 0.0
    if tokens.selected is not None and algorithm.settings.entropy_coef:
        more = (tokens.mask.sum() / tokens.selected.sum()).item()
        assert more > 2 and entropy.grad is not None
        assert_close(entropy.grad * more, expected["entropy_gradient"])
        bonus = (more - 1) * (entropy.grad * entropy.detach()).sum().item()
    assert_close(found.item() + bonus, expected["loss"])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("token_truncate", {"correction_max": 1.3}),
        ("token_mask", {"correction_min": 0.8, "correction_max": 1.3}),
        ("sequence_truncate", {"correction_max": 1.5}),
    ],
)
def test_weights_and_what_is_said_of_them_are_verls(batch, name, settings):
    tokens = packed(batch)
    algorithm = made(correction=name, **settings)
    weights, metrics = algorithm._correction.weights(tokens.old - tokens.rollout, tokens)
    expected = batch["corrections"][name]
    assert_close(weights, expected["weights"], batch["mask"])
    means = {f"loss/{n}": value[tokens.mask].mean().item() for n, value in metrics.items()}
    summary = algorithm.summary(means)
    assert summary["loss/anchor_rollout"] == 0
    assert_close(summary["loss/weight_std"], expected["std"])
    assert_close(summary["loss/weight_ess"], expected["eff_sample_size"])
    if name == "token_mask":
        assert_close(means["loss/weight_bounded"], expected["oob_ratio"])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "settings",
    [
        {"correction": "token_truncate", "correction_max": 1.3},
        {
            "correction": "token_mask",
            "correction_min": 0.8,
            "correction_max": 1.3,
            "rejection": "tokens",
            "rejection_divergence": "k3",
            "rejection_max": 0.05,
        },
        {
            "correction": "sequence_truncate",
            "correction_max": 1.5,
            "rejection": "sequence_mean",
            "rejection_min": 1 / 1.2,
            "rejection_max": 1 / 0.9,
        },
    ],
)
def test_weights_divided_by_their_mean_are_verls_with_rejection_too(batch, settings):
    """The mean is over all tokens, or samples, before any is rejected; micro-batches and ranks add
    up the two streams."""
    algorithm = made(correction_normalize=True, **settings)
    tokens = packed(batch)
    total, count = (part[tokens.mask].sum().item() for part in algorithm.averaged(tokens))
    expected = batch["corrections"][settings["correction"] + "_normalized"]
    assert_close(total / count, expected["batch_norm_factor"])
    stay = tokens.mask & algorithm.keep(tokens) if algorithm.rejects else tokens.mask
    assert_close(stay.numpy(), expected["mask"])
    left = replace(packed(batch), mask=stay, step_mean=total / count)
    weights, metrics = algorithm._correction.weights(left.old - left.rollout, left)
    assert_close(weights, expected["weights"], stay)
    assert_close(metrics["weight_norm"], np.full(len(stay), total / count))


def ratio_band(low: float, high: float) -> dict:
    """verl's bounds are of engine to trainer."""
    return {"rejection_min": 1 / high, "rejection_max": 1 / low}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("token", {"rejection": "tokens", **ratio_band(0.7, 1.5)}),
        ("token_k3", {"rejection": "tokens", "rejection_divergence": "k3", "rejection_max": 0.05}),
        ("sequence_sum", {"rejection": "sequence_sum", **ratio_band(0.5, 2.0)}),
        ("sequence_mean", {"rejection": "sequence_mean", **ratio_band(0.9, 1.2)}),
        (
            "sequence_mean_k3",
            {"rejection": "sequence_mean", "rejection_divergence": "k3", "rejection_max": 0.03},
        ),
        ("veto_k2", {"rejection": "veto", "rejection_divergence": "k2", "rejection_max": 0.2}),
        (
            "several",
            {
                "rejection": "sequence_mean,tokens,veto",
                "rejection_divergence": "k1,k3,k2",
                "rejection_min": (1 / 1.2, None, None),
                "rejection_max": (1 / 0.9, 0.05, 0.2),
            },
        ),
    ],
)
def test_what_is_rejected_is_verls(batch, name, settings):
    tokens = packed(batch)
    kept = tokens.mask & made(**settings).keep(tokens)
    expected = np.array(batch["corrections"][name]["mask"])
    assert_close(kept.numpy(), expected)
    assert 0 < kept.sum() < tokens.mask.sum()


@pytest.mark.parametrize("batch", BATCHES)
def test_off_policy_samples_are_trls(batch):
    """Of the policy that is updated, here the one before the update."""
    first = torch.tensor(batch["advantages"], dtype=torch.float64)[:, :1]
    advantages = first.expand(-1, LONGEST).reshape(-1)
    tokens = packed(batch, advantages=advantages, logprobs=flat(batch, "old"))
    algorithm = made(rejection="off_policy", rejection_max=0.02)
    rejected = algorithm.loss(tokens).metrics["rejected_share"]
    expected = np.repeat(np.array(batch["corrections"]["off_policy"]["keep"]), LONGEST)
    assert_close(1 - rejected, expected, batch["mask"])
    assert 0 < expected.sum() < len(expected)


BYPASSED = {
    "bypass_ppo_clip_geo_rs": {},
    "bypass_ppo_clip_k3_rs": {"rejection_max": 0.08},
    "bypass_pg_geo_rs_token_tis": {"correction_max": 1.3},
    "bypass_pg_geo_rs_seq_tis": {"correction_max": 1.5},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", list(BATCHES[0]["bypasses"]))
def test_verls_bypasses_reject_by_the_policy_that_is_updated(batch, case):
    """The policy has moved since the forward before the update, by which other tokens would go."""
    name, how = case.split()
    band = {} if "k3" in name else ratio_band(0.9, 1.2)
    algorithm = made(correction=name, aggregation=how, mini_batches=2, **BYPASSED[name], **band)
    logprobs = flat(batch, "new").requires_grad_()
    tokens = packed(batch, logprobs=logprobs)
    assert not algorithm.rejects
    found = algorithm.loss(tokens)
    kept = np.array(batch["mask"]).sum(axis=1)
    scales = aggregate(how, kept, np.array(batch["groups"]), np.ones_like(kept), LONGEST)
    total = mean_over(found.values, tokens, scales)
    total.backward()
    expected = batch["bypasses"][case]
    assert_close(total.item(), expected["loss"])
    assert_close(logprobs.grad, expected["gradient"])
    share = found.metrics["rejected_share"][tokens.mask].mean()
    assert share.item() == pytest.approx(expected["masked"], rel=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
def test_how_far_trainer_and_engine_are_apart_is_as_verl_says(batch):
    rollout, trainer = (np.array(batch[name]).ravel() for name in ("rollout", "old"))
    mask = np.array(batch["mask"]).ravel()
    samples = np.repeat(np.arange(len(batch["mask"])), LONGEST)
    found = mismatch(rollout, trainer, mask) | mismatch_of_samples(rollout, trainer, mask, samples)
    names = {
        "kl_k1": "kl",
        "kl": "k3_kl",
        "chi2": "chi2_token",
        "chi2_sequence": "chi2_seq",
        "trainer_ppl": "training_ppl",
        "rollout_ppl": "rollout_ppl",
    }
    for ours, theirs in names.items():
        assert_close(found[ours], batch["corrections"]["apart"][theirs])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
def test_estimates_of_the_kl_and_their_gradients_are_verls(batch, kind):
    new = torch.tensor(batch["new"], dtype=torch.float64)
    new[0, 0] = batch["old"][0][0] + 0.5
    logprobs = new.reshape(-1).requires_grad_()
    values = estimate(kind, logprobs, flat(batch, "reference"))
    values.sum().backward()
    assert_close(values.detach(), batch["kl"][kind]["values"])
    assert_close(logprobs.grad, batch["kl"][kind]["gradient"])
