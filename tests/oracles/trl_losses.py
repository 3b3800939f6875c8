"""What TRL's GRPOTrainer makes of a batch of `record.py`: its losses with their gradients."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import GRPOTrainer

# Of TRL's: what its trainer is told, what its config says, and where weights are cut off, if any.
SEQUENCE = {"importance_sampling_level": "sequence"}
TRL_LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "grpo": ({"loss_type": "grpo"}, {"epsilon_high": 0.28}, None),
    "dapo": ({"loss_type": "dapo"}, {"epsilon_high": 0.28}, None),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {}, None),
    "delta": ({"loss_type": "dapo"}, {"delta": 1.3}, None),
    "cispo": ({"loss_type": "cispo"}, {"epsilon_high": 1.4}, None),
    "sapo": ({"loss_type": "sapo"}, {}, None),
    "gspo": ({"loss_type": "grpo"} | SEQUENCE, {"epsilon": 0.02, "epsilon_high": 0.05}, None),
    "luspo": ({"loss_type": "luspo"} | SEQUENCE, {"epsilon": 0.02, "epsilon_high": 0.05}, None),
    "vespo": ({"loss_type": "vespo"}, {}, None),
    "vespo_engine": ({"loss_type": "vespo"}, {}, 1e9),
    "tis": ({"loss_type": "dapo"}, {}, 1.3),
    "kl": ({"loss_type": "dapo"}, {"beta": 0.3, "use_bias_correction_kl": False}, None),
    "kl_weighted": ({"loss_type": "dapo"}, {"beta": 0.3, "use_bias_correction_kl": True}, None),
    "kl_weighted_tis": ({"loss_type": "dapo"}, {"beta": 0.3}, 1.3),
    "off_policy": ({"loss_type": "dapo", "off_policy_mask_threshold": 0.05}, {}, None),
    "off_policy_kl_tis": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        {"beta": 0.3, "use_bias_correction_kl": False},
        1.3,
    ),
    "high_entropy": ({"loss_type": "dapo", "top_entropy_quantile": 0.3}, {}, None),
    "high_entropy_grpo": ({"loss_type": "grpo", "top_entropy_quantile": 0.3}, {}, None),
    "high_entropy_dr_grpo": ({"loss_type": "dr_grpo", "top_entropy_quantile": 0.25}, {}, None),
    "high_entropy_all": (
        {
            "loss_type": "dapo",
            "top_entropy_quantile": 0.4,
            "_entropy_bonus_enabled": True,
            "entropy_coef": 0.2,
        },
        {"beta": 0.3, "use_bias_correction_kl": False},
        1.3,
    ),
}


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_batch(b: dict[str, Any]) -> dict[str, Any]:
    """Of TRL's GRPOTrainer, whose loss is asked without a model: of one micro-batch, with one
    advantage a sample. The first token's ratio is not an extreme one: TRL bounds none."""
    mask, advantages = tensor(b["mask"]), tensor(b["advantages"])[:, 0]
    new, old, rollout = (tensor(b[name]) for name in ("new", "old", "rollout"))
    new[0, 0] = old[0, 0] + 0.5
    ones = torch.ones(len(mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": mask.long(),
        "completion_mask": mask, "advantages": advantages, "old_per_token_logps": old,
        "ref_per_token_logps": tensor(b["reference"]), "num_items_in_batch": mask.sum(),
        "sampling_per_token_logps": rollout,
    }  # fmt: skip
    of_engine = ((old - rollout) * mask).exp()
    found: dict[str, Any] = {}
    for name, (ours, args, cap) in TRL_LOSSES.items():
        weights = {} if cap is None else {"importance_sampling_ratio": of_engine.clamp(max=cap)}
        logprobs, entropy = new.clone().requires_grad_(), tensor(b["entropy"]).requires_grad_()
        trainer = trl_trainer(ours, args, logprobs, entropy, corrects=cap is not None)
        loss = GRPOTrainer._compute_loss(trainer, None, inputs | weights)
        loss.backward()
        found[name] = {"loss": loss.item(), "gradient": logprobs.grad.tolist()}
        if entropy.grad is not None:
            found[name]["entropy_gradient"] = entropy.grad.tolist()
    return found


def trl_trainer(
    ours: dict[str, Any],
    args: dict[str, Any],
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    corrects: bool,
) -> Any:
    """What the loss reads of the trainer."""
    defaults = trl.GRPOConfig.__dataclass_fields__
    args = {name: field.default for name, field in defaults.items()} | args
    args["steps_per_generation"] = 1
    own = {
        "epsilon_low": args["epsilon"], "importance_sampling_level": "token",
        "vllm_importance_sampling_correction": corrects, "top_entropy_quantile": 1.0,
        "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
        "off_policy_mask_threshold": None,
    } | ours  # fmt: skip
    trainer = SimpleNamespace(
        **own,
        epsilon_high=args["epsilon_high"] or args["epsilon"],
        beta=args["beta"],
        args=SimpleNamespace(**args),
        aux_loss_enabled=False,
        use_vllm=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=logprobs.shape[1],
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda one: one,
            reduce=lambda one, reduction: one,
            pad_across_processes=lambda one, **_: one,
            sync_gradients=False,
        ),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
    )
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    return trainer
