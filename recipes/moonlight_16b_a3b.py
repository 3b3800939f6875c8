"""Moonlight-16B-A3B (a DeepSeek-V3 in small) learns grade-school mathematics on 4 GPUs of 80 GB.

    python recipes/moonlight_16b_a3b.py
    python recipes/moonlight_16b_a3b.py trainer.world_size=4 trainer.ep=4 rollout.engines=4
    python recipes/moonlight_16b_a3b.py trainer.world_size=1 trainer.ep=1 rollout.engines=1 \\
        trainer.gpus_per_rank=0.5 rollout.gpus_per_engine=0.5 trainer.recompute=full \\
        rollout.gpu_memory_utilization=0.45                          # one shared GPU of 140 GB
    python recipes/moonlight_16b_a3b.py data.path=recipes/data/math_small.jsonl data.subset=null \\
        model.path=/models/Moonlight-16B-A3B-Instruct                # no network

GPUs: 2 for the trainer (EP 2), 2 for engines. By the plan a trainer rank holds 46 GiB of 79,
an engine 72, with room for 604 sequences of 2,048 tokens. Not run yet.

On this model others saw router replay matter most: watch `mismatch/kl` and `replay/coverage`, which
must stay at 1, beside `reward/mean`.
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

hardware = Hardware(gpus=4, gpu="h100")

config = RunConfig(
    name="moonlight_16b_a3b",
    model=ModelConfig(
        path="moonshotai/Moonlight-16B-A3B-Instruct", max_length=2048,
        trust_remote_code=True,  # its tokenizer is a file of Moonshot's
    ),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=100, world_size=2, ep=2, device="cuda", micro_batch_tokens=4096, lr=2e-5,
        warmup_steps=5,
    ),
    rollout=RolloutConfig(engines=2, max_response_tokens=1536, gpu_memory_utilization=0.9),
    algorithm=AlgorithmConfig(prompts_per_step=64, group_size=8),
    data=DataConfig(path="openai/gsm8k", subset="main", chat_template=True),
    reward=RewardConfig(function="lora_moe_rl.rewards:math_verify"),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
