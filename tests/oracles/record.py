"""Writes what verl and TRL make of a few made-up batches to a file.

    make oracles         # tests/unit/algorithms/oracles.json

Run in an environment of its own: neither is a dependency of the project. All in float64.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
import trl_losses
import verl
from trl import GRPOTrainer
from trl_losses import tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_and_rejection_mask as correct,
)
from verl.workers.config import ActorConfig, PolicyLossConfig

BATCHES = 3
SIZES = (4, 3, 4, 1, 2)  # samples of each group
LONGEST = 9

ADVANTAGES = {
    "grpo": (core_algos.compute_grpo_outcome_advantage, {}),
    "grpo_without_std": (
        core_algos.compute_grpo_outcome_advantage,
        {"norm_adv_by_std_in_grpo": False},
    ),
    "rloo": (core_algos.compute_rloo_outcome_advantage, {}),
    "opo": (core_algos.compute_opo_outcome_advantage, {}),
    "reinforce_pp": (
        core_algos.compute_reinforce_plus_plus_outcome_advantage,
        {"config": SimpleNamespace(gamma=0.9)},
    ),
    "reinforce_pp_baseline": (
        core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
        {},
    ),
    "gpg": (core_algos.compute_gpg_outcome_advantage, {}),
}
REWEIGHTS = ("pow", "max_min", "max_random")
POWER = 1.5
# Of two reward functions, the second with this weight.
SECOND_WEIGHT = 0.25

# Name: verl's loss, and what its config says.
LOSSES = {
    "ppo_clip": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}),
    "dual_clip": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}),
    "gspo": ("gspo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
    "cispo": ("cispo", {"clip_ratio_low": 0.9, "clip_ratio_high": 0.5}),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "dppo_tv": ("dppo_tv", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0}),
    "dppo_kl": ("dppo_kl", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0}),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
    "dro": ("dro", {"policy_loss": PolicyLossConfig(dro_beta=0.3)}),
}
ONE_AGGREGATION = ("sapo", "gmpo")  # verl's take no other than seq-mean-token-mean
# verl's losses that go by a covariance over the batch.
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
COVARIANCE_LOSSES = {
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 0.6},
    "kl_cov": {"kl_cov_ratio": 0.15, "ppo_kl_coef": 0.3},
}
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)

CORRECTIONS = {
    "token_truncate": {"rollout_is": "token", "rollout_is_threshold": 1.3},
    "token_mask": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    "sequence_truncate": {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    "token": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.5"},
    "token_k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.05},
    "sequence_sum": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "sequence_mean": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.2"},
    "sequence_mean_k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.03},
    "veto_k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.2},
    "several": {
        "rollout_rs": "seq_mean_k1,token_k3,seq_max_k2",
        "rollout_rs_threshold": "0.9_1.2,0.05,0.2",
    },
    "token_truncate_normalized": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.3,
        "rollout_is_batch_normalize": True,
    },
    "token_mask_normalized": {
        "rollout_is": "token",
        "rollout_is_threshold": "0.8_1.3",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k3",
        "rollout_rs_threshold": 0.05,
    },
    "sequence_truncate_normalized": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.5,
        "rollout_is_batch_normalize": True,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.9_1.2",
    },
}
# verl's rejections of the policy that is updated, with the engine in the ratio.
GEOMETRIC = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.2"}
K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.08}
BYPASSES = {
    "bypass_ppo_clip_geo_rs": {"loss_type": "ppo_clip", "rollout_is": None} | GEOMETRIC,
    "bypass_ppo_clip_k3_rs": {"loss_type": "ppo_clip", "rollout_is": None} | K3,
    "bypass_pg_geo_rs_token_tis": {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_threshold": 1.3,
    }
    | GEOMETRIC,
    "bypass_pg_geo_rs_seq_tis": {
        "loss_type": "reinforce",
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.5,
    }
    | GEOMETRIC,
}
# Of trainer against engine, whatever the correction.
APART = ("kl", "k3_kl", "chi2_token", "chi2_seq", "training_ppl", "rollout_ppl")


def batch(seed: int) -> dict[str, Any]:
    """Masks with holes, a group of one, a group of equal rewards, and a few extreme ratios."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(SIZES)), SIZES)
    n = len(groups)
    lengths = rng.integers(1, LONGEST + 1, n)
    mask = np.arange(LONGEST) < lengths[:, None]
    mask &= (rng.random(mask.shape) > 0.2) | (np.arange(LONGEST) == lengths[:, None] - 1)
    rewards = rng.choice([0.0, 1.0, 0.5, -0.25], n)
    rewards[groups == 2] = 0.7
    old = np.log(rng.uniform(0.05, 0.95, mask.shape))
    new = old + rng.normal(0, 0.3, mask.shape)
    rollout = old + rng.normal(0, 0.2, mask.shape)
    old[0, 0], new[0, 0], rollout[0, 0] = -25.5, -0.5, -25.4
    rollout[1, 0] = old[1, 0] - 6.0
    mask[:2, 0] = True
    new, rollout = np.minimum(new, -1e-3), np.minimum(rollout, -1e-3)
    reference = old + rng.normal(0, 0.4, mask.shape)
    advantages = rng.normal(0, 1, n)[:, None] + rng.normal(0, 0.1, mask.shape)
    values = rng.normal(0.3, 0.5, mask.shape)
    new_values = values + rng.normal(0, 0.3, mask.shape)
    second = rng.choice([0.0, 3.0, 4.0], n)
    second[groups == 0] = 3.0  # a group that the second function does not tell apart
    named = {
        "second": second, "values": values, "new_values": new_values,
        "groups": groups, "mask": mask, "rewards": rewards, "old": old, "new": new,
        "rollout": rollout, "reference": reference, "advantages": advantages,
        "entropy": rng.integers(0, 24, mask.shape) / 8,  # some are equal
    }  # fmt: skip
    return {name: value.tolist() for name, value in named.items()}


def at_last(b: dict[str, Any]) -> torch.Tensor:
    """The reward of each sample at its last token."""
    mask = tensor(b["mask"])
    rewards = torch.zeros_like(mask)
    last = (torch.arange(LONGEST) * mask).argmax(dim=1)
    rewards[torch.arange(len(mask)), last] = tensor(b["rewards"])
    return rewards


def advantages_of(b: dict[str, Any]) -> dict[str, Any]:
    mask = tensor(b["mask"])
    groups = np.array(b["groups"])
    alone = torch.from_numpy(np.bincount(groups)[groups] == 1)
    found = {}
    for name, (function, options) in ADVANTAGES.items():
        rewards = at_last(b)
        if name == "reinforce_pp_baseline":
            rewards[alone] = 0.0  # to verl a sample alone is worth its whole reward
        if name != "reinforce_pp":
            options = {"index": groups, **options}
        found[name] = function(rewards, mask, **options)[0].tolist()
    found["gdpo"] = gdpo_of(b, alone.numpy())
    of_greedy = core_algos.compute_remax_outcome_advantage(at_last(b), tensor(b["second"]), mask)
    found["remax"] = of_greedy[0].tolist()
    several = ~alone
    for name, by_deviation in {"grpo_passk": True, "grpo_passk_without_std": False}.items():
        # verl raises for a sample that is alone.
        of_others, _ = core_algos.compute_grpo_passk_outcome_advantage(
            at_last(b)[several],
            mask[several],
            index=groups[several.numpy()],
            config={"norm_adv_by_std_in_grpo": by_deviation},
        )
        every = torch.zeros_like(mask)
        every[several] = of_others
        found[name] = every.tolist()
    return found


def gdpo_of(b: dict[str, Any], alone: np.ndarray) -> list[list[float]]:
    """verl takes what each reward function gave in float32, so that this is in float32."""
    mask = tensor(b["mask"])
    last = torch.arange(LONGEST) <= (torch.arange(LONGEST) * mask).argmax(dim=1)[:, None]
    scores = {name: np.where(alone, 0.0, b[name]) for name in ("rewards", "second")}
    found, _ = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros_like(mask),
        mask,
        index=np.array(b["groups"]),
        config={"gdpo_reward_keys": [*scores], "gdpo_reward_weights": [1.0, SECOND_WEIGHT]},
        non_tensor_batch=scores,
        batch={"prompts": torch.zeros(len(mask), 0), "attention_mask": last.long()},
    )
    return found.tolist()


def revised_of(b: dict[str, Any]) -> dict[str, Any]:
    """Advantages of rewards from which each token's KL to the reference is taken."""
    mask, groups = tensor(b["mask"]), np.array(b["groups"])
    alone = torch.from_numpy(np.bincount(groups)[groups] == 1)
    found = {}
    for kind in ("k1", "k2", "k3"):
        # As verl's apply_kl_penalty does it, which wants packages that are nothing to the numbers.
        kl = core_algos.kl_penalty(tensor(b["old"]), tensor(b["reference"]), kind) * mask
        taken = at_last(b) - 0.2 * kl
        for name in ("grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline"):
            function, options = ADVANTAGES[name]
            rewards = taken.clone()
            if name == "reinforce_pp_baseline":
                rewards[alone] = 0.0
            if name != "reinforce_pp":
                options = {"index": groups, **options}
            found[f"{name} {kind}"] = function(rewards, mask, **options)[0].tolist()
        values = tensor(b["values"])
        gae = core_algos.compute_gae_advantage_return(taken, values, mask, 0.95, 0.9)
        found[f"gae {kind}"] = gae[0].tolist()
    return found


class Batch(dict):
    """What verl draws from: tensors, and their number."""

    batch_size: Any = None


def reweights_of(b: dict[str, Any]) -> dict[str, list[float]]:
    """What verl's PF-PPO draws samples by: the weights that it gives to torch.multinomial."""
    found: dict[str, list[float]] = {}
    original, n = torch.multinomial, len(b["rewards"])
    for how in REWEIGHTS:

        def seen(weights: torch.Tensor, draws: int, replacement: bool, how=how) -> torch.Tensor:
            assert draws == n and replacement
            found[how] = weights.tolist()
            return original(weights, draws, replacement=replacement)

        torch.multinomial = seen
        data = SimpleNamespace(
            batch=Batch(token_level_scores=at_last(b)), non_tensor_batch={}, meta_info={}
        )
        core_algos.compute_pf_ppo_reweight_data(data, how, POWER)
    torch.multinomial = original
    return found


def losses_of(b: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (loss, options) in LOSSES.items():
        for how in AGGREGATIONS:
            if name in ONE_AGGREGATION and how != "seq-mean-token-mean":
                continue
            config = ActorConfig(
                strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options
            )
            new = tensor(b["new"]).requires_grad_()
            value, metrics = core_algos.get_policy_loss_fn(loss)(
                old_log_prob=tensor(b["old"]),
                log_prob=new,
                advantages=tensor(b["advantages"]),
                response_mask=tensor(b["mask"]),
                loss_agg_mode=how,
                config=config,
            )
            value.backward()
            found[f"{name} {how}"] = {"loss": value.item(), "gradient": new.grad.tolist()}
            if name == "dual_clip":
                shares = ("pg_clipfrac", "pg_clipfrac_lower")
                found[f"{name} {how}"] |= {share: metrics[f"actor/{share}"] for share in shares}
    return found


def covariance_losses_of(b: dict[str, Any]) -> dict[str, Any]:
    """With the last of the candidates drawn. The first token's ratio is not an extreme one: verl
    bounds none here."""
    found: dict[str, Any] = {}
    original = torch.randperm
    torch.randperm = lambda n: torch.arange(n).flip(0)
    for name, options in COVARIANCE_LOSSES.items():
        for how in AGGREGATIONS:
            config = ActorConfig(
                strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
                policy_loss=PolicyLossConfig(**options), **CLIP,
            )  # fmt: skip
            new = tensor(b["new"])
            new[0, 0] = b["old"][0][0] + 0.5
            new.requires_grad_()
            value, metrics = core_algos.get_policy_loss_fn(name)(
                old_log_prob=tensor(b["old"]),
                log_prob=new,
                advantages=tensor(b["advantages"]),
                response_mask=tensor(b["mask"]),
                loss_agg_mode=how,
                config=config,
            )
            value.backward()
            metrics = {key.removeprefix("actor/"): one for key, one in metrics.items()}
            found[f"{name} {how}"] = {"loss": value.item(), "gradient": new.grad.tolist()} | metrics
    torch.randperm = original
    return found


def corrections_of(b: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in CORRECTIONS.items():
        weights, mask, metrics = correct(
            old_log_prob=tensor(b["old"]),
            rollout_log_prob=tensor(b["rollout"]),
            response_mask=tensor(b["mask"]),
            **options,
        )
        weights = None if weights is None else weights.batch["rollout_is_weights"].tolist()
        names = ("eff_sample_size", "std", "batch_norm_factor", "oob_ratio")
        shown = {n: metrics.get(f"rollout_corr/rollout_is_{n}") for n in names}
        found[name] = {"weights": weights, "mask": mask.tolist(), **shown}
        found["apart"] = {n: metrics[f"rollout_corr/{n}"] for n in APART}
    trl_mask = GRPOTrainer.get_off_policy_mask(
        tensor(b["advantages"])[:, :1], *(tensor(b[k]) for k in ("old", "rollout", "mask")), 0.02
    )
    found["off_policy"] = {"keep": trl_mask[:, 0].tolist()}
    return found


def bypasses_of(b: dict[str, Any]) -> dict[str, Any]:
    """As verl's workers ask for them in every optimizer step: divided by what is in it before any
    is rejected."""
    mask = tensor(b["mask"])
    found: dict[str, Any] = {}
    for name, correction in BYPASSES.items():
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_c=1e9,
            policy_loss=PolicyLossConfig(rollout_correction=correction),
        )
        whole = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
        config.global_batch_info.update(whole)
        for how in ("token-mean", "seq-mean-token-mean"):
            new = tensor(b["new"]).requires_grad_()
            given = tensor(b["rollout"]), new, tensor(b["advantages"]), mask, how, config
            loss, metrics = core_algos.compute_policy_loss_bypass_mode(*given)
            loss.backward()
            found[f"{name} {how}"] = {
                "loss": loss.item(),
                "gradient": new.grad.tolist(),
                "masked": metrics["rollout_corr/rollout_rs_masked_fraction"],
            }
    return found


def critic_of(b: dict[str, Any]) -> dict[str, Any]:
    """GAE, with a lambda for all and with VAPO's of each sample; the value loss and its gradient;
    the explained variance, which is a metric of a whole batch."""
    mask, values = tensor(b["mask"]), tensor(b["values"])
    rewards = at_last(b)
    lengths = mask.sum(dim=1)
    adaptive = 1 - 1 / (0.3 * lengths).clamp(min=1)
    found: dict[str, Any] = {}
    for name, lam in {"gae": 0.9, "gae_1": 1.0, "adaptive": adaptive}.items():
        advantages, returns = core_algos.compute_gae_advantage_return(
            rewards, values, mask, 0.95, lam
        )
        found[name] = {"advantages": advantages.tolist(), "returns": returns.tolist()}
    returns = tensor(found["gae"]["returns"])
    for how in AGGREGATIONS:
        new = tensor(b["new_values"]).requires_grad_()
        loss, clipped = core_algos.compute_value_loss(new, returns, values, mask, 0.2, how)
        loss.backward()
        found[f"loss {how}"] = {
            "loss": loss.item(), "clipped": clipped.item(), "gradient": new.grad.tolist(),
        }  # fmt: skip
    whole = torch.ones(len(mask), LONGEST, dtype=torch.float64)
    metrics = compute_data_metrics(
        SimpleNamespace(
            batch={
                "token_level_scores": rewards,
                "token_level_rewards": rewards,
                "advantages": returns,
                "returns": returns,
                "values": values,
                "prompts": whole,
                "responses": whole,
                "attention_mask": torch.cat([whole, mask], dim=1),
                "response_mask": mask,
            },
            non_tensor_batch={},
            meta_info={},
        ),
        use_critic=True,
    )
    found["explained"] = metrics["critic/vf_explained_var"]
    return found


def kl_of(b: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for kind in ("k1", "k2", "k3", "k3+"):
        new = tensor(b["new"])
        new[0, 0] = b["old"][0][0] + 0.5  # verl cuts k3 off at 10
        new.requires_grad_()
        values = core_algos.kl_penalty(new, tensor(b["reference"]), kind)
        values.sum().backward()
        found[kind] = {"values": values.tolist(), "gradient": new.grad.tolist()}
    return found


def main(out: Path) -> None:
    batches = []
    for seed in range(BATCHES):
        b = batch(seed)
        b |= {
            "advantages_of": advantages_of(b),
            "losses": losses_of(b),
            "covariance_losses": covariance_losses_of(b),
            "trl_losses": trl_losses.of_batch(b),
            "corrections": corrections_of(b),
            "bypasses": bypasses_of(b),
            "kl": kl_of(b),
            "critic": critic_of(b),
            "revised": revised_of(b),
            "reweights": reweights_of(b),
        }
        batches.append(b)
    assert not any(math.isnan(v["loss"]) for b in batches for v in b["losses"].values())
    versions = {"verl": verl.__version__, "trl": trl.__version__}
    out.write_text(json.dumps({"versions": versions, "batches": batches}) + "\n")
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB, from {versions}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
