"""Names that people know from elsewhere lead to ours."""

import re
from pathlib import Path

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.alias_table import ALIASES, MISSING
from lora_moe_rl.config.aliases import as_table, missing_as_table
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
        ("critic.optim.lr", "algorithm.critic_lr"),
        ("critic_learning_rate", "algorithm.critic_lr"),
        ("warmup_ratio", "trainer.warmup_steps (a number of steps"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "trainer.warmup_steps (a number"),
        ("vllm_mode", "placement.mode (colocated for TRL's colocate"),
        ("async_training.partial_rollout", "schedule.in_flight=continue"),
        ("async_training.staleness_threshold", "schedule.lag (in steps"),
        ("algorithm.filter_groups", "algorithm.draw_again (at most"),
        ("filter_groups.enable", "algorithm.draw_again (at most"),
        ("delta", "algorithm.dual_clip"),
        ("actor_rollout_ref.actor.clip_ratio_c", "algorithm.dual_clip"),
        ("actor_rollout_ref.actor.loss_agg_mode", "algorithm.aggregation"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.loss (vanilla is ppo_clip"),
        ("algorithm.lam", "algorithm.lambda_policy and algorithm.lambda_value"),
        ("critic.cliprange_value", "algorithm.value_clip"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "environment.max_turns"),
        ("max_tool_calling_iterations", "environment.max_turns (turns of the policy"),
        ("expert_parallel_size", "trainer.ep"),
        ("actor_rollout_ref.rollout.expert_parallel_size", "rollout.ep (true"),
        ("data.truncation", "data.too_long (error or drop"),
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_horizon"),
        ("algorithm.rollout_correction.rollout_is", "algorithm.correction=tis (or another"),
        ("data.apply_chat_template_kwargs.enable_thinking", "data.chat_template_kwargs"),
        ("custom_reward_function.reward_kwargs.scale", "reward.args"),
        ("reward_model.overlong_buffer.len", "algorithm.overlong_buffer"),
        ("grpo.num_generations_per_prompt", "algorithm.group_size"),
        ("loss_fn.reference_policy_kl_penalty", "algorithm.kl_coef"),
        ("policy.generation.vllm_cfg.tensor_parallel_size", "rollout.tp"),
        ("policy.megatron_cfg.tensor_model_parallel_size", "trainer.tp"),
        ("rollout-batch-size", "algorithm.prompts_per_step (counts prompts"),
        ("n-samples-per-prompt", "algorithm.group_size"),
        ("generator.inference_engine_tensor_parallel_size", "rollout.tp"),
        ("orchestrator.rollouts_per_example", "algorithm.group_size"),
        ("scale_rewards", "algorithm.normalize_std (group, step (TRL's batch) or none)"),
    ],
)
def test_a_name_from_elsewhere_leads_to_ours(theirs, ours):
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), [f"{theirs}=1"])
    assert f"unknown config key {theirs!r}; here it is {ours}" in str(error.value)


def test_what_they_lead_to_is_there_and_what_they_are_is_not():
    keys = all_keys()
    for one in (*ALIASES, *MISSING):
        for key in re.findall(r"(?<![\w-])[a-z]+\.[A-Za-z_0-9]+", " ".join(one[1:])):
            assert key in keys or key == "file.py", key
        assert not set(one.names) & set(keys)
    names = [name for one in (*ALIASES, *MISSING) for name in one.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["rollout.top_p", "top_k", "actor_rollout_ref.rollout.min_p"])
def test_settings_that_change_the_distribution_are_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=r"whole softmax.*rollout.temperature is what both sides"):
        override(RunConfig(), [f"{name}=0.9"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lora_dropout", "another policy than the one that sampled"),
        ("sync_ref_model", "stays as it is in a run"),
        ("actor_rollout_ref.actor.use_dynamic_bsz", "always packed without padding"),
        ("actor_rollout_ref.rollout.name", "vLLM samples with them"),
        ("load_in_4bit", "name such a model with model.path"),
    ],
)
def test_what_there_is_not_is_said_with_the_reason(name, why):
    with pytest.raises(ConfigError, match=f"unknown config key '{name}'; there is none: .*{why}"):
        override(RunConfig(), [f"{name}=1"])


def test_all_unknown_keys_are_told_of_at_once():
    line = ["trainer.lr=1", "rollout.n=8", "--colocate", "--use-tis"]
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), line)
    assert [text.split("'")[1] for text in str(error.value).splitlines()] == [
        "rollout.n", "colocate", "use-tis",
    ]  # fmt: skip


def test_of_a_file_the_innermost_keys_are_told_of(tmp_path):
    """verl's own YAML, as it is."""
    file = tmp_path / "verl.yaml"
    file.write_text(
        "actor_rollout_ref:\n  actor: {optim: {lr: 1.0e-6}, use_kl_loss: true}\n  rollout: {n: 8}\n"
        "data: {train_files: x.parquet}\nnothing: {}\n"
    )
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), [f"@{file}"])
    found = [text.split("'")[1] for text in str(error.value).splitlines()]
    ours = [text.partition("; ")[2] for text in str(error.value).splitlines()]
    assert found == [
        "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.use_kl_loss",
        "actor_rollout_ref.rollout.n", "data.train_files", "nothing",
    ]  # fmt: skip
    assert ours[0] == "here it is trainer.lr" and ours[2] == "here it is algorithm.group_size"


def test_the_page_has_the_tables_as_they_are():
    assert f"\n|---|---|---|\n{as_table()}\n\n" in PAGE.read_text()
    assert f"\n|---|---|\n{missing_as_table()}\n\n" in PAGE.read_text()


def test_keys_of_all_sections_are_told_at_once(tmp_path):
    """Those of a section that chooses a plug-in too, which alone are for the validation."""
    (tmp_path / "verl.yaml").write_text(
        "data: {train_files: x}\nalgorithm: {adv_estimator: grpo, rollout_correction: {bypass_mode:"
        " true}, name: grpo}\nenvironment: {env_class: text2sql}\n"
    )
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), [f"@{tmp_path}/verl.yaml"])
    lines = str(error.value).splitlines()
    assert [line.partition("'")[2].partition("'")[0] for line in lines] == [
        *("data.train_files", "algorithm.adv_estimator"),
        *("algorithm.rollout_correction.bypass_mode", "environment.env_class"),
    ]
    assert lines[2].endswith("here it is algorithm.anchor (rollout for true)")


def test_keys_of_all_sections_are_told_at_once_on_the_command_line_too():
    with pytest.raises(ConfigError) as error:
        override(
            RunConfig(),
            [
                *("algorithm.adv_estimator=grpo", "data.train_files=x", "algorithm.name=grpo"),
                *("algorithm.rollout_correction.bypass_mode=true", "environment.env_class=x"),
            ],
        )
    assert [line.split("'")[1] for line in str(error.value).splitlines()] == [
        *("data.train_files", "algorithm.adv_estimator"),
        *("algorithm.rollout_correction.bypass_mode", "environment.env_class"),
    ]


@pytest.mark.parametrize("name", ["algorithm.name=my.py:Mine", "seed=1"])
def test_a_setting_of_ones_own_plugin_is_not_told_beside_a_misspelt_key(tmp_path, name):
    """Which settings a plug-in of one's own has is not known there; it may be the recipe's."""
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {stpes: 3}\nalgorithm: {sharp: 2}\n")
    for arguments in ([name, "algorithm.sharp=2", "trainer.stpes=3"], [f"@{file}"]):
        with pytest.raises(ConfigError) as error:
            override(RunConfig(), arguments)
        assert str(error.value) == "unknown config key 'trainer.stpes'; did you mean trainer.steps?"


def test_nor_one_that_another_tool_has_too():
    own = ["algorithm.name=my.py:Mine", "algorithm.epsilon=2", "trainer.stpes=3"]
    with pytest.raises(ConfigError, match="^unknown config key 'trainer.stpes'[^\n]*$"):
        override(RunConfig(), own)
