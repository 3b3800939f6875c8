"""Qwen3-235B-A22B learns mathematics on 4 nodes of 8 GPUs of 80 GB.

    python recipes/qwen3_235b_a22b.py
    python recipes/qwen3_235b_a22b.py data.path=recipes/data/math_small.jsonl data.subset=null \\
        data.answer_key=answer model.path=/models/Qwen3-235B-A22B    # no network

GPUs: 16 for the trainer (TP 4, PP 4, EP 4), 16 for two engines of TP 8. By the plan a trainer rank
holds up to 39 GiB of 79, an engine rank 71, with room for 26 sequences of 8,192
tokens. Not run yet.

Watch `refit/seconds` (13 GB of adapters a step) and `mismatch/kl` beside `reward/mean`. Decoding is
what takes the step's time: more engines help before more trainer ranks do.
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

hardware = Hardware(gpus=32, gpu="h100")

config = RunConfig(
    name="qwen3_235b_a22b",
    model=ModelConfig(path="Qwen/Qwen3-235B-A22B", max_length=8192),
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
        path="open-r1/DAPO-Math-17k-Processed", subset="en", answer_key="solution",
        chat_template=True,
    ),
    reward=RewardConfig(function="lora_moe_rl.rewards:math_verify"),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
