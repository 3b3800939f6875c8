"""Settings of a service: what has no effect there is refused, or told."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_moe_rl.config.keys import all_keys
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.service.settings import KEYS
from lora_moe_rl.service.start import config_of


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.lr=1e-3", "trainer.clip_grad=0.5", "trainer.steps=3", "trainer.max_restarts=0",
        "rollout.temperature=0.5", "rollout.max_response_tokens=20", "replay.missing=mask",
        "replay.compare_every=2", "schedule.lag=1", "algorithm.group_size=4", "data.path=x.jsonl",
        "reward.function=exact_match", "mismatch.stop_above=0.5", "logging.profile=3",
        "tracker=wandb", "adapter.resize=true", "checkpoint.every=7", "faults.stall_s=3",
    ],
)  # fmt: skip
def test_what_has_no_effect_is_refused(setting, tmp_path):
    key, _, _ = setting.partition("=")
    more = ["algorithm.correction=tis", "refit.slots=9"] if key == "schedule.lag" else []
    with pytest.raises(ConfigError, match=r"has no effect with a training service"):
        config_of("qwen3_moe", [setting, *more], tmp_path)


@pytest.mark.parametrize(
    "setting",
    [
        "refit.mode=merged", "adapter.init=olora",
        "adapter.init_from=there", "trainer.offload=optimizer", "replay.mode=r2",
    ],
)  # fmt: skip
def test_what_a_service_cannot_do_is_refused(setting, tmp_path):
    with pytest.raises(ConfigError, match=f"{setting} is not there with a training service"):
        config_of("qwen3_moe", [setting], tmp_path)


def test_of_a_recipe_what_has_no_effect_is_told(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: qwen3_moe\ntrainer: {lr: 1.0e-3, ep: 1, world_size: 2}\n"
                      "data: {path: x.jsonl}\nrefit: {slots: 3}\n")  # fmt: skip
    config = config_of(str(recipe), ["trainer.ep=2"], tmp_path)
    assert (config.trainer.ep, config.refit.slots) == (2, 3)
    told = " ".join(capsys.readouterr().err.split())
    assert "recipe.yaml sets data.path, trainer.lr, which clients of a service choose" in told


def test_a_recipe_that_samples_nothing_is_served_with_replay(tmp_path):
    """Its algorithm is not the clients': it says nothing of engines and routes."""
    recipe = Path(__file__).parents[3] / "recipes" / "tiny_sft.py"
    config = config_of(str(recipe), ["rollout.engines=2", "replay.audit=3"], tmp_path)
    assert not config.offline
    assert (config.replay.mode, config.replay.missing, config.replay.audit) == ("r3", "route", 3)


def test_keys_without_effect_are_keys():
    assert {f"{section}.{key}" for section, keys in KEYS.items() for key in keys} < {*all_keys()}
