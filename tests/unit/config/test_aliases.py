"""Names that people know from elsewhere lead to ours."""

import re
from pathlib import Path

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.aliases import ALIASES, NOT_SAMPLED_WITH, as_table
from lora_moe_rl.config.keys import all_keys
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs/from_verl.md"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("learning_rate", "trainer.lr"),
        ("num_generations", "algorithm.group_size"),
        ("rollout.n", "algorithm.group_size"),
        ("actor_rollout_ref.rollout.n", "algorithm.group_size"),
        ("actor_rollout_ref.actor.optim.lr", "trainer.lr"),
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", "trainer.ep"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.tp"),
        ("beta", "algorithm.kl_coef"),
        ("algorithm.epsilon", "algorithm.clip_low and algorithm.clip_high"),
        ("epsilon_high", "algorithm.clip_high"),
        ("max_completion_length", "rollout.max_response_tokens"),
        ("max-prompt-length", "model.max_length (prompt plus response"),
        ("save_steps", "checkpoint.every"),
        ("lora_r", "adapter.rank"),
        ("lora_alpha", "adapter.alpha"),
        ("report_to", "tracker.name"),
        ("importance_sampling_level", "algorithm.loss (gspo for"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.gpu_memory_utilization"),
        ("vllm_importance_sampling_correction", "algorithm.correction=tis"),
        ("per_device_train_batch_size", "trainer.micro_batch_tokens (tokens packed"),
    ],
)
def test_a_name_from_elsewhere_leads_to_ours(theirs, ours):
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), [f"{theirs}=1"])
    assert f"unknown config key {theirs!r}; here it is {ours}" in str(error.value)


def test_what_they_lead_to_is_there_and_what_they_are_is_not():
    keys = all_keys()
    for alias in ALIASES:
        for key in re.findall(r"(?<![\w-])[a-z]+\.[A-Za-z_0-9]+", f"{alias.ours} {alias.note}"):
            assert key in keys or key == "file.py", key
        assert not set(alias.names) & set(keys)
    names = [name for alias in ALIASES for name in alias.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["rollout.top_p", "top_k", "actor_rollout_ref.rollout.min_p"])
def test_settings_that_change_the_distribution_are_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=r"whole softmax.*rollout.temperature is what both sides"):
        override(RunConfig(), [f"{name}=0.9"])


def test_the_page_names_what_is_not_sampled_with():
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in NOT_SAMPLED_WITH)


def test_the_page_has_the_table_as_it_is():
    assert f"\n|---|---|---|\n{as_table()}\n\n" in PAGE.read_text()
