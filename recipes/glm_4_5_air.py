"""GLM-4.5-Air (106B) learns mathematics on 2 nodes of 8 GPUs of 80 GB.

    python recipes/glm_4_5_air.py
    python recipes/glm_4_5_air.py data.path=recipes/data/math_small.jsonl data.prompt_key=prompt \\
        data.answer_key=answer model.path=/models/GLM-4.5-Air            # no network

GPUs: 8 for the trainer (TP 4, PP 2, EP 4), 8 for an engine of TP 8. By the plan a trainer rank
holds up to 36 GiB of 79, an engine rank 71, with room for 229 sequences of 8,192
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

hardware = Hardware(gpus=16, gpu="h100")

config = RunConfig(
    name="glm_4_5_air",
    model=ModelConfig(path="zai-org/GLM-4.5-Air", max_length=8192),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=8, tp=4, pp=2, ep=4, device="cuda", recompute="full",
        micro_batch_tokens=8192, lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=1, tp=8, ep=True, max_response_tokens=6144, gpu_memory_utilization=0.9,
        start_timeout_s=1800,
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
