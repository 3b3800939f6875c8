"""GLM-4.7-Flash (30B, MLA) learns mathematics on one node of 8 GPUs of 80 GB.

    python recipes/glm_4_7_flash.py
    python recipes/glm_4_7_flash.py data.path=recipes/data/math_small.jsonl data.subset=null \\
        data.answer_key=answer model.path=/models/GLM-4.7-Flash      # no network

GPUs: 4 for the trainer (EP 4), 4 for two engines of TP 2. By the plan a trainer rank holds 28
GiB of 79, an engine rank 71, with room for 91 sequences of 8,192 tokens. Not run yet. Its 20 heads
are cut by 2 and 4, not by 8. The layer that predicts one token more is left out of training and
serving.

Watch `reward/mean`, and `mismatch/kl`: with replayed routes it should stay below 1e-3.
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
    name="glm_4_7_flash",
    model=ModelConfig(path="zai-org/GLM-4.7-Flash", max_length=8192),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=4, ep=4, device="cuda", recompute="full", micro_batch_tokens=8192,
        lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=2, tp=2, ep=True, max_response_tokens=6144, gpu_memory_utilization=0.9
    ),
    algorithm=AlgorithmConfig(prompts_per_step=64, group_size=8),
    data=DataConfig(
        path="open-r1/DAPO-Math-17k-Processed", subset="en", answer_key="solution",
        chat_template=True,
    ),
    reward=RewardConfig(function="lora_moe_rl.rewards:math_verify"),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
