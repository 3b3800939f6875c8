"""DeepSeek-V3 (671B) learns mathematics on 4 nodes of 8 GPUs of 140 GB.

    python recipes/deepseek_v3_671b.py
    python recipes/deepseek_v3_671b.py data.path=recipes/data/math_small.jsonl data.subset=null \\
        data.answer_key=answer model.path=/models/DeepSeek-V3        # no network

GPUs: 16 for the trainer (TP 8, PP 2, EP 8; experts stay in the checkpoint's FP8), 16 for two
engines of TP 8, which serve the FP8. By the plan a trainer rank holds up to 66 GiB of 139, an
engine rank 125, with room for 67 sequences of 8,192 tokens. Not run yet.

Trainer and engines differ by the rounding of FP8: watch `mismatch/kl`, which will be larger than
with equal weights, and raise refit.proof_tolerance only as far as the first steps show.
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
    name="deepseek_v3_671b",
    model=ModelConfig(path="deepseek-ai/DeepSeek-V3", max_length=8192),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=16, tp=8, pp=2, ep=8, device="cuda", recompute="full",
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
