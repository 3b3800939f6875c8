"""Qwen3-30B-A3B learns from pairs which of two answers is the better one (DPO), on 4 GPUs of 80 GB.
Nothing is sampled: no engine starts.

    python recipes/dpo_30b.py data.path=pairs.jsonl
    lora-moe-rl check recipes/dpo_30b.py                             # pairs as the model gets them

Rows are {"prompt": ..., "chosen": ..., "rejected": ...}, as TRL has them; the eight of
recipes/data/pairs_small.jsonl show the form and are no training set.

GPUs: 4 for the trainer (EP 4). By the plan a trainer rank holds 30 GiB of 79. Not run yet.

Watch `rewards/accuracies` rise above 0.5, and `logps/chosen`: where it falls as fast as
`logps/rejected` the answers themselves become unlikely; take a smaller learning rate.
"""

from pathlib import Path

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.planner.hardware import Hardware

hardware = Hardware(gpus=4, gpu="h100")
DATA = Path(__file__).parent / "data"

config = RunConfig(
    name="dpo_30b",
    model=ModelConfig(path="Qwen/Qwen3-30B-A3B", max_length=8192),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=4, ep=4, device="cuda", recompute="full", micro_batch_tokens=8192,
        lr=5e-6, warmup_steps=5,
    ),
    algorithm={"name": "dpo", "prompts_per_step": 64, "beta": 0.1},
    data=DataConfig(path=str(DATA / "pairs_small.jsonl"), chat_template=True, too_long="drop"),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
