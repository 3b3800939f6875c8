"""What `lora-moe-rl serve` refuses before an engine starts, and what it takes from its words."""

from __future__ import annotations

import pytest
from engine_fixtures import save_random_model

from lora_moe_rl.endpoint import command
from lora_moe_rl.errors import ConfigError, ModelError


def planned(*words: str) -> command.Plan:
    return command.planned(command._parser().parse_intermixed_args([str(word) for word in words]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_random_model("qwen3_moe", folder)
    return folder


def test_settings_of_the_engine_are_taken(model):
    config = planned(model, "rollout.tp=2", "model.max_length=128", "trainer.dtype=float32").config
    assert (config.rollout.tp, config.model.max_length) == (2, 128)
    assert (config.rollout.engines, config.trainer.world_size) == (1, 1)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rollout.engines=3", "serve does not read rollout.engines; it reads rollout.*"),
        ("rollout.temperature=0.5", "serve does not read rollout.temperature; .* in its requests"),
        ("rollout.max_response_tokens=5", "serve does not read rollout.max_response_tokens; it "),
        ("rollout.silent_s=5", "serve does not read rollout.silent_s"),
        ("refit.slots=9", "serve does not read refit.slots"),
        ("trainer.lr=5", "serve does not read trainer.lr"),
        ("adapter.rank=4", "serve does not read adapter.rank"),
        ("model=deepseek_v3", "serve does not read model.path"),
        ("@settings.yaml", "serve does not read trainer.world_size"),
        ("--versions=7", "--versions 7 has no effect: SOURCE is a model"),
        ("--base=x", "--base x has no effect"),
    ],
)
def test_what_it_does_not_read_is_refused(model, word, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text("rollout: {tp: 1}\ntrainer: {world_size: 4}\n")
    with pytest.raises(ConfigError, match=said):
        planned(model, word)


def test_a_source_that_is_none_is_called_so():
    with pytest.raises(ModelError, match="^SOURCE 'nowhere' is not a directory"):
        planned("nowhere")
