"""Qwen3-30B-A3B learns mathematics with Python at hand, in several turns, on one node of 8 GPUs of
80 GB.

    python recipes/tools_30b.py
    python recipes/tools_30b.py data.path=recipes/data/math_small.jsonl data.subset=null \\
        data.answer_key=answer model.path=/models/Qwen3-30B-A3B      # no network

A turn that calls the tool is answered with what its code printed, in a sandbox; the first turn
without a call is the answer. What the tool says is not trained on.

GPUs: 4 for the trainer (EP 4), 4 for two engines of TP 2. By the plan a trainer rank holds 30
GiB of 79, an engine rank 71, with room for 96 sequences of 8,192 tokens. Not run yet.

Watch `reward/mean`, and what the environment counts: `environment/tool_calls` must not fall to 0.
"""

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.planner.hardware import Hardware

hardware = Hardware(gpus=8, gpu="h100")

config = RunConfig(
    name="tools_30b",
    model=ModelConfig(path="Qwen/Qwen3-30B-A3B", max_length=8192),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=4, ep=4, device="cuda", recompute="full", micro_batch_tokens=8192,
        lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=2, tp=2, ep=True, max_response_tokens=6144, gpu_memory_utilization=0.9
    ),
    algorithm=AlgorithmConfig(prompts_per_step=64, group_size=8),
    environment={"name": "tools", "tools": ["lora_moe_rl.tools:python"], "calls": "json"},
    data=DataConfig(
        path="open-r1/DAPO-Math-17k-Processed", subset="en", answer_key="solution",
        chat_template=True,
    ),
    reward=RewardConfig(function="lora_moe_rl.rewards:math_verify"),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
