"""Published models by their names on the hub: a later one of a config that is known has what is its
own, the positions."""

import pytest

from lora_moe_rl import cli
from lora_moe_rl.errors import ModelError
from lora_moe_rl.planner.facts import find


@pytest.mark.parametrize(
    ("hub", "name", "positions"),
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B", 40960),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen3-30B-A3B", 262144),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-30B-A3B", 262144),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B", 262144),
        ("zai-org/GLM-4.5-Air", "GLM-4.5-Air", 131072),
        ("zai-org/GLM-4.5", "GLM-4.5", 131072),
        ("zai-org/GLM-4.6", "GLM-4.5", 202752),
        ("glm-4.7", "GLM-4.5", 202752),
        ("zai-org/GLM-4.7-Flash", "GLM-4.7-Flash", 202752),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-V3", 163840),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "DeepSeek-V3", 163840),
        ("moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2", 131072),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "Moonlight-16B-A3B", 8192),
    ],
)
def test_a_published_model_is_found_by_its_name(hub, name, positions):
    found = find(hub)
    assert (found.name, found.config["max_position_embeddings"]) == (name, positions)
    assert found.path.rpartition("/")[2].lower() == hub.rpartition("/")[2].lower()


def test_one_that_is_not_known_is_told_the_nearest():
    with pytest.raises(ModelError, match=r"did you mean .*DeepSeek-V3.*It knows"):
        find("deepseek-ai/DeepSeek-V3.2")


def test_without_a_recipe_samples_are_no_longer_than_the_model_knows(capsys):
    assert cli.main(["plan", "--model", "olmoe-1b-7b", "--gpus", "4", "--json"]) == 0
    assert cli.main(["plan", "--model", "olmoe-1b-7b", "--gpus", "4", "model.max_length=8192"]) == 2
    assert "model.max_length=8192 is more than the model's 4096" in capsys.readouterr().err
