"""What TRL, PEFT and verl call our settings, for the error of an unknown key and a page of docs.

A name stands for every key that ends in it: `rollout.n` for `actor_rollout_ref.rollout.n`.
"""

from __future__ import annotations

from typing import NamedTuple


class Missing(NamedTuple):
    """`names`: what others say. `why`: why there is none of it here."""

    names: tuple[str, ...]
    why: str


class Alias(NamedTuple):
    """`names`: what others say. `ours`: the keys, or the setting, as it is written here. `note`:
    what differs, or ''."""

    names: tuple[str, ...]
    ours: str
    note: str = ""


ALIASES = (
    Alias(("model_name_or_path", "actor_rollout_ref.model.path"), "model.path"),
    Alias(("train_files", "train_dataset", "dataset_name"), "data.path"),
    Alias(("model_revision",), "model.revision"),
    Alias(("dtype", "torch_dtype"), "trainer.dtype"),
    Alias(("dataset_config",), "data.subset"),
    Alias(("dataset_train_split",), "data.split"),
    Alias(("shuffle_dataset",), "data.order", "shuffle or sequential"),
    Alias(("train_batch_size", "generation_batch_size"), "algorithm.prompts_per_step",
          "counts prompts, not samples"),
    Alias(("num_generations", "rollout.n"), "algorithm.group_size"),
    Alias(("max_prompt_length",), "model.max_length",
          "prompt plus response; a prompt may have what rollout.max_response_tokens leaves"),
    Alias(("max_completion_length", "max_response_length", "max_new_tokens"),
          "rollout.max_response_tokens"),
    Alias(("vllm_max_model_length", "max_model_len"), "model.max_length"),
    Alias(("temperature",), "rollout.temperature"),
    Alias(("stop", "stop_strings", "generation_kwargs.stop"), "rollout.stop"),
    Alias(("chat_template_kwargs",), "data.chat_template_kwargs"),
    Alias(("custom_chat_template",), "model.chat_template", "the text itself"),
    Alias(("chat_template_path",), "model.chat_template_file"),
    Alias(("overlong_filter", "filter_overlong_prompts"), "data.too_long=drop"),
    Alias(("truncation",), "data.too_long", "error or drop: no prompt is cut"),
    Alias(("max_assistant_turns", "max_tool_calling_iterations"), "environment.max_turns",
          "turns of the policy, with the one that calls nothing"),
    Alias(("shuffle",), "data.order", "shuffle, sequential or by:COLUMN"),
    Alias(("max_steps", "total_training_steps"), "trainer.steps"),
    Alias(("num_train_epochs", "total_epochs"), "trainer.steps", "a run has steps, not epochs"),
    Alias(("learning_rate", "optim.lr"), "trainer.lr"),
    Alias(("critic.optim.lr", "critic_learning_rate"), "algorithm.critic_lr"),
    Alias(("warmup_steps", "lr_warmup_steps"), "trainer.warmup_steps"),
    Alias(("warmup_ratio", "lr_warmup_steps_ratio"), "trainer.warmup_steps",
          "a number of steps, not a share of them"),
    Alias(("lr_scheduler_type", "lr_scheduler"), "trainer.lr_schedule"),
    Alias(("min_lr_ratio",), "trainer.min_lr", "a learning rate, not a ratio"),
    Alias(("loraplus_lr_ratio",), "trainer.lr_ratio_B"),
    Alias(("max_grad_norm", "grad_clip"), "trainer.clip_grad"),
    Alias(("weight_decay",), "trainer.weight_decay"),
    Alias(("adam_beta1",), "trainer.adam_beta1"),
    Alias(("adam_beta2",), "trainer.adam_beta2", "0.95 here, 0.999 in TRL"),
    Alias(("adam_epsilon",), "trainer.adam_eps"),
    Alias(("beta", "kl_loss_coef", "kl_coeff", "init_kl_coef"), "algorithm.kl_coef"),
    Alias(("use_kl_in_reward", "use_kl_loss"), "algorithm.kl_in", "reward, or loss"),
    Alias(("kl_penalty", "kl_loss_type"), "algorithm.kl_estimator", "low_var_kl is k3, kl is k1"),
    Alias(("use_bias_correction_kl",), "algorithm.kl_weighted", "on by default in TRL"),
    Alias(("entropy_coeff", "ent_coef", "entropy_loss_coef"), "algorithm.entropy_coef"),
    Alias(("epsilon", "clip_ratio", "cliprange"), "algorithm.clip_low and algorithm.clip_high"),
    Alias(("epsilon_low", "clip_ratio_low"), "algorithm.clip_low"),
    Alias(("epsilon_high", "clip_ratio_high"), "algorithm.clip_high"),
    Alias(("delta", "clip_ratio_c"), "algorithm.dual_clip"),
    Alias(("tau_pos", "sapo_temperature_pos"), "algorithm.tau_positive"),
    Alias(("tau_neg", "sapo_temperature_neg"), "algorithm.tau_negative"),
    Alias(("vespo_k_pos", "vespo_k_neg"), "algorithm.vespo_k_positive and vespo_k_negative"),
    Alias(("vespo_lambda_pos", "vespo_lambda_neg"),
          "algorithm.vespo_lambda_positive and vespo_lambda_negative"),
    Alias(("policy_loss.dro_beta",), "algorithm.dro_beta", "with loss=dro; 0.1 until it is set"),
    Alias(("cliprange_value",), "algorithm.value_clip"),
    Alias(("critic_warmup", "num_critic_only_steps"), "algorithm.critic_warmup"),
    Alias(("lam",), "algorithm.lambda_policy and algorithm.lambda_value",
          "of the policy's advantages and of the critic's returns"),
    Alias(("scale_rewards", "norm_adv_by_std_in_grpo"), "algorithm.normalize_std",
          "group, step (TRL's batch) or none"),
    Alias(("filter_groups", "filter_groups.enable", "dynamic_sampling"),
          "algorithm.draw_again", "at most so many times prompts_per_step"),
    Alias(("overlong_buffer.len",), "algorithm.overlong_buffer"),
    Alias(("overlong_buffer.penalty_factor",), "algorithm.overlong_penalty"),
    Alias(("loss_agg_mode",), "algorithm.aggregation"),
    Alias(("loss_scale_factor",), "rollout.max_response_tokens",
          "what seq-mean-token-sum-norm divides by"),
    Alias(("loss_mode",), "algorithm.loss", "vanilla is ppo_clip, geo_mean is gmpo, gpg is "
          "reinforce, dppo_tv and dppo_kl are dppo"),
    Alias(("staleness_threshold", "max_off_policy_steps"), "schedule.lag",
          "in steps, not a share of samples"),
    Alias(("partial_rollout",), "schedule.in_flight=continue", "with schedule.lag above 0"),
    Alias(("num_iterations", "ppo_epochs"), "algorithm.epochs"),
    Alias(("ppo_mini_batch_size", "steps_per_generation"), "algorithm.mini_batches",
          "the number of optimizer steps of a pass, not their size"),
    Alias(("adv_estimator",), "algorithm.name", "or algorithm.advantage: gpg, grpo_passk, opo; "
          "remax and the optimal token baselines are not there"),
    Alias(("loss_type",), "algorithm.name", "or algorithm.loss: vespo; of DPO algorithm.pair_loss; "
          "luspo is loss=gspo with aggregation=seq-mean-token-sum, bnpo is token-mean over each "
          "micro-batch alone"),
    Alias(("importance_sampling_level",), "algorithm.loss", "gspo for TRL's sequence"),
    Alias(("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "rollout_is"),
          "algorithm.correction=tis", "or another: TRL's modes, verl's sets have names here"),
    Alias(("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max",
           "rollout_is_threshold"),
          "algorithm.correction_max", "of `0.5_5.0` the first is algorithm.correction_min"),
    Alias(("vllm_importance_sampling_clip_min",), "algorithm.correction_min"),
    Alias(("off_policy_mask_threshold",), "algorithm.rejection=off_policy",
          "it is algorithm.rejection_max; what it masks leaves the denominator too"),
    Alias(("mask_truncated_completions",), "algorithm.mask_truncated"),
    Alias(("zero_variance_filter_tol",), "algorithm.equal_within"),
    Alias(("use_pf_ppo", "reweight_method"), "algorithm.reweight", "pow, max_min or max_random"),
    Alias(("weight_pow",), "algorithm.reweight_power"),
    Alias(("rollout_is_batch_normalize",), "algorithm.correction_normalize"),
    Alias(("rollout_rs",), "algorithm.rejection", "one or several: token_k1 is tokens, seq_sum_k1 "
          "is sequence_sum, seq_mean_k1 is sequence_mean, seq_max_k2 is veto"),
    Alias(("rollout_rs_threshold",), "algorithm.rejection_min and algorithm.rejection_max",
          "ratios of trainer to engine: verl's k1 is of engine to trainer"),
    Alias(("per_device_train_batch_size", "ppo_micro_batch_size_per_gpu",
           "ppo_max_token_len_per_gpu", "gradient_accumulation_steps"),
          "trainer.micro_batch_tokens", "tokens packed into one micro-batch of a rank"),
    Alias(("gradient_checkpointing", "enable_gradient_checkpointing"), "trainer.recompute=full"),
    Alias(("use_prefix_grouper",), "trainer.share_prompts",
          "auto, the default, shares wherever it can"),
    Alias(("lora_r", "lora_rank", "lora.rank", "lora.dim"), "adapter.rank",
          "adapter.expert_rank for routed experts"),
    Alias(("lora_alpha", "lora.alpha"), "adapter.alpha"),
    Alias(("lora_target_modules", "target_modules"), "adapter.targets"),
    Alias(("use_rslora",), "adapter.rslora"),
    Alias(("init_lora_weights",), "adapter.init"),
    Alias(("lora_adapter_path",), "adapter.init_from"),
    Alias(("target_kl", "kl_ctrl.type"), "algorithm.kl_target", "null for verl's type fixed"),
    Alias(("kl_ctrl.horizon",), "algorithm.kl_horizon"),
    Alias(("ref_adapter_name",), "algorithm.reference=start", "against adapter.init_from"),
    Alias(("router_replay.mode", "enable_rollout_routing_replay"), "replay.mode"),
    Alias(("megatron.tensor_model_parallel_size",), "trainer.tp"),
    Alias(("pipeline_model_parallel_size",), "trainer.pp"),
    Alias(("virtual_pipeline_model_parallel_size",), "trainer.vpp"),
    Alias(("expert_model_parallel_size", "expert_parallel_size"), "trainer.ep"),
    Alias(("rollout.expert_parallel_size",), "rollout.ep",
          "true: an engine's ranks share its experts"),
    Alias(("expert_tensor_parallel_size",), "trainer.etp"),
    Alias(("n_gpus_per_node", "nnodes", "num_processes"), "trainer.world_size and rollout.engines",
          "trainer ranks and engines have GPUs of their own, unless they share some"),
    Alias(("vllm_mode",), "placement.mode", "colocated for TRL's colocate, split for its server"),
    Alias(("vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size"), "rollout.tp"),
    Alias(("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
          "rollout.gpu_memory_utilization"),
    Alias(("enforce_eager",), "rollout.enforce_eager"),
    Alias(("engine_kwargs.vllm", "vllm_kwargs"), "rollout.engine_args"),
    Alias(("reward_funcs", "custom_reward_function.path", "custom_reward_function.name"),
          "reward.function", "file.py:function; several: reward.functions.NAME"),
    Alias(("reward_weights", "gdpo_reward_weights"), "reward.functions.NAME.weight"),
    Alias(("reward_kwargs",), "reward.args"),
    Alias(("multi_objective_aggregation",), "algorithm.advantage=gdpo", "for normalize_then_sum"),
    Alias(("eval_steps", "test_freq"), "eval.every"),
    Alias(("val_files", "eval_dataset"), "eval.sets.NAME.path"),
    Alias(("num_generations_eval", "val_kwargs.n"), "eval.sets.NAME.samples"),
    Alias(("val_kwargs.temperature",), "eval.sets.NAME.temperature"),
    Alias(("val_kwargs.top_p",), "eval.sets.NAME.top_p"),
    Alias(("val_kwargs.top_k",), "eval.sets.NAME.top_k", "0 for verl's -1"),
    Alias(("eval_on_start", "val_before_train"), "eval.at_start"),
    Alias(("val_only",), "lora-moe-rl eval RECIPE"),
    Alias(("save_steps", "save_freq"), "checkpoint.every"),
    Alias(("save_total_limit", "max_actor_ckpt_to_keep"), "checkpoint.keep"),
    Alias(("early_stopping_patience",), "checkpoint.stop_after",
          "of checkpoint.best_metric, which TRL calls metric_for_best_model"),
    Alias(("resume_from_checkpoint", "resume_mode"), "--resume"),
    Alias(("log_completions", "num_completions_to_print"), "logging.samples_per_step"),
    Alias(("global_profiler.steps", "profile_steps"), "logging.profile", "of trainer ranks"),
    Alias(("output_dir", "default_local_dir"), "logging.run_dir"),
    Alias(("report_to", "trainer.logger"), "tracker.name"),
    Alias(("project_name",), "tracker.project"),
    Alias(("run_name", "experiment_name"), "name"),
)  # fmt: skip

MISSING = (
    Missing(("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty", "logit_bias", "bad_words"),
            "tokens are sampled from the whole softmax, since the trainer's logprobs are over all "
            "tokens, and which of them an engine would have kept is not recorded: the loss would "
            "be of another distribution; rollout.temperature is what both sides apply"),
    Missing(("lora_dropout",),
            "engines sample with the adapter as it is, and a trainer that drops some of it would "
            "update another policy than the one that sampled"),
    Missing(("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
            "what a KL is measured against stays as it is in a run; to measure against what was "
            "trained, merge it first (lora-moe-rl export --to merged) and train that"),
    Missing(("top_entropy_quantile",),
            "all tokens that the policy wrote are in the loss, whatever their entropy; "
            "algorithm.entropy_coef keeps it up"),
    Missing(("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"),
            "clip_cov and kl_cov treat some tokens of a batch otherwise, by how advantage and "
            "logprob go together over all of it; no loss here depends on the other tokens of a "
            "micro-batch"),
    Missing(("use_adaptive_entropy", "entropy_target", "entropy_coef_delta", "entropy_coef_min",
             "entropy_coef_max"),
            "algorithm.entropy_coef stays as it is; TRL's may follow the entropy"),
    Missing(("context_parallel_size", "ulysses_sequence_parallel_size"),
            "the trainer has no context parallelism; trainer.tp, trainer.recompute and "
            "trainer.offload make room for long sequences"),
)  # fmt: skip

_BY_NAME = {name: one for one in (*ALIASES, *MISSING) for name in one.names}


def find(name: str) -> Alias | Missing | None:
    """What is known of a key that nobody here knows: of its longest end that is in the tables."""
    parts = name.replace("-", "_").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_BY_NAME[end] for end in ends if end in _BY_NAME), None)


def as_table() -> str:
    """The rows of docs/from_verl.md."""
    return "\n".join(
        f"| {', '.join(f'`{name}`' for name in names)} | `{ours}` | {note} |"
        for names, ours, note in ALIASES
    )


def missing_as_table() -> str:
    """The rows of what there is not, there too."""
    return "\n".join(
        f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for names, why in MISSING
    )
