"""Qwen3-30B-A3B learns mathematics with responses of up to 30,720 tokens, on one node of 8 GPUs of
80 GB.

    python recipes/long_context_30b.py
    lora-moe-rl plan recipes/long_context_30b.py model=Qwen/Qwen3-30B-A3B-Thinking-2507 \
        model.max_length=131072 rollout.engines=1 rollout.tp=4 trainer.tp=2 trainer.cp=2

GPUs: 4 for the trainer (TP 4, EP 4), 4 for two engines of TP 2. By the plan a trainer rank holds 28
GiB of 79, an engine rank 71, with room for 24 sequences of 32,768 tokens. Not run yet.

Samples that are cut off have no answer, and are left out of the loss. Watch `rollout/truncated`,
`rollout/response_length` and `reward/mean`; and `time/rollout`: a step is as long as its longest
sample, unless sampling goes ahead of training (`schedule.lag`).
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
    name="long_context_30b",
    model=ModelConfig(path="Qwen/Qwen3-30B-A3B", max_length=32768),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=4, tp=4, ep=4, device="cuda", recompute="full",
        micro_batch_tokens=32768, lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=2, tp=2, ep=True, max_response_tokens=30720, gpu_memory_utilization=0.9
    ),
    algorithm=AlgorithmConfig(prompts_per_step=32, group_size=8, mask_truncated=True),
    data=DataConfig(
        path="open-r1/DAPO-Math-17k-Processed", subset="en", answer_key="solution",
        chat_template=True,
    ),
    reward=RewardConfig(function="lora_moe_rl.rewards:math_verify"),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
