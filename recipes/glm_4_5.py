"""GLM-4.5 (355B) learns mathematics on 4 nodes of 8 GPUs of 140 GB.

    python recipes/glm_4_5.py
    python recipes/glm_4_5.py data.path=recipes/data/math_small.jsonl data.prompt_key=prompt \\
        data.answer_key=answer model.path=/models/GLM-4.5            # no network

GPUs: 16 for the trainer (TP 4, PP 4, EP 4), 16 for two engines of TP 8. By the plan a trainer rank
holds up to 57 GiB of 139, an engine rank 125, with room for 96 sequences of 8,192
tokens. Not run yet. The layer that predicts one token more is left out of training and serving.

Watch `mismatch/kl` beside `reward/mean`, and `rollout/truncated`: this model thinks at length.
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

hardware = Hardware(gpus=32, gpu="h200")

config = RunConfig(
    name="glm_4_5",
    model=ModelConfig(path="zai-org/GLM-4.5", max_length=8192),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=16, tp=4, pp=4, ep=4, device="cuda", recompute="full",
        micro_batch_tokens=8192, lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=2, tp=8, ep=True, max_response_tokens=6144, gpu_memory_utilization=0.9,
        start_timeout_s=3600,
    ),
    algorithm=AlgorithmConfig(prompts_per_step=64, group_size=8),
    data=DataConfig(
        path="DigitalLearningGmbH/MATH-lighteval", prompt_key="problem", answer_key="solution",
        chat_template=True,
    ),
    reward=RewardConfig(function="lora_moe_rl.rewards:math_verify"),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
