"""Kimi-K2 (1.03T) learns mathematics on 8 nodes of 8 GPUs of 140 GB.

    python recipes/kimi_k2_1t.py
    lora-moe-rl plan recipes/kimi_k2_1t.py --search                  # other layouts of 64 GPUs
    python recipes/kimi_k2_1t.py data.path=recipes/data/math_small.jsonl data.subset=null \\
        data.answer_key=answer model.path=/models/Kimi-K2-Instruct   # no network

GPUs: 16 for the trainer (TP 8, PP 2, EP 8; experts stay in the checkpoint's FP8), 48 for six
engines of TP 8, which serve the FP8. By the plan a trainer rank holds up to 78 GiB of 139, an
engine rank 132, with room for 9 sequences of 8,192 tokens.
The experts of a layer share the tensor on the hidden side (`shared_outer`), so that the adapter has
9.4 GB and not 41. Not run yet.

Trainer and engines differ by the rounding of FP8: watch `mismatch/kl`. Decoding takes most of a
step, since weights fill the engines: more engines, or fewer bits a weight, help most.
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

hardware = Hardware(gpus=64, gpu="h200")

config = RunConfig(
    name="kimi_k2_1t",
    model=ModelConfig(
        path="moonshotai/Kimi-K2-Instruct", max_length=8192,
        trust_remote_code=True,  # its tokenizer is a file of Moonshot's
    ),
    adapter=AdapterConfig(rank=32, alpha=64, expert_layout="shared_outer"),
    trainer=TrainerConfig(
        steps=200, world_size=16, tp=8, pp=2, ep=8, device="cuda", recompute="full",
        micro_batch_tokens=8192, lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=6, tp=8, ep=True, max_response_tokens=6144, gpu_memory_utilization=0.95,
        start_timeout_s=7200,
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
