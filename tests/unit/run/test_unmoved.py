"""Settings that bound a ratio which is always 1 are warned of, and do nothing indeed."""

import numpy as np
import pytest
import torch
from packed_tokens import tokens_of

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.run.unmoved import check

FAR = {
    "ppo_clip": {"clip_low": 0.9, "clip_high": 0.0, "dual_clip": 1.01},
    "gspo": {"clip_low": 0.9, "clip_high": 9.0},
    "gmpo": {"log_clip_low": 0.9, "log_clip_high": 9.0},
    "cispo": {"ratio_min": 0.9, "ratio_max": 1.0},
    "sapo": {"tau_positive": 50.0, "tau_negative": 50.0},
    "dppo": {"divergence": "kl", "divergence_max": 1e-9},
    "vespo": {
        "vespo_k_positive": 9.0,
        "vespo_lambda_positive": 0.1,
        "vespo_k_negative": 9.0,
        "vespo_lambda_negative": 0.1,
    },
}


def gradient(**settings) -> torch.Tensor:
    rng = np.random.default_rng(0)
    logprobs = torch.tensor(np.log(rng.uniform(0.1, 0.9, 24))).requires_grad_()
    advantages = torch.tensor(rng.normal(0, 1, 4)).repeat_interleave(6)
    samples = torch.arange(4).repeat_interleave(6)
    tokens = tokens_of(logprobs, logprobs.detach(), advantages, samples=samples)
    algorithms.make(RunConfig(algorithm=settings)).loss(tokens).values.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize("loss", FAR)
def test_what_does_nothing_is_said_and_does_nothing(loss):
    assert set(FAR[loss]) == set(PARTS["loss"].find(loss).of_moved)
    torch.testing.assert_close(gradient(loss=loss, **FAR[loss]), gradient(loss="reinforce"))
    for name, value in FAR[loss].items():
        text = check(RunConfig(algorithm={"loss": loss, name: value}))
        assert text.startswith(f"algorithm.{name}={value} has no effect with one update a step")


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "gspo", "clip_low": 0.9, "clip_high": 9.0},
        {"name": "dapo", "clip_high": 9.0, "dual_clip": 3.0},
    ],
)
def test_several_are_named_at_once(settings):
    names = [name for name in settings if name not in ("loss", "name")]
    said = ", ".join(f"{name}={settings[name]}" for name in names)
    assert check(RunConfig(algorithm=settings)).startswith(f"algorithm.{said} have no effect")


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "dapo"},
        {"clip_high": 0.2},
        {"clip_high": 9.0, "mini_batches": 2},
        {"clip_high": 9.0, "epochs": 2},
        {"clip_high": 9.0, "anchor": "rollout"},
        {"loss": "clip_cov", "clip_cov_ratio": 0.1},
        {"loss": "reinforce"},
        {"name": "sft"},
    ],
)
def test_what_is_a_presets_own_or_has_an_effect_is_not_said(settings):
    assert check(RunConfig(algorithm=settings)) == ""
