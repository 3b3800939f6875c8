"""Kimi-K2-Thinking (1.03T, INT4 experts) learns mathematics on one node of 8 GPUs of 140 GB.

    lora-moe-rl plan recipes/kimi_k2_thinking.py
    python recipes/kimi_k2_thinking.py
    lora-moe-rl plan recipes/kimi_k2_thinking.py adapter.rank=8      # more room for the KV cache
    python recipes/kimi_k2_thinking.py model.path=kimi-k2.5-text     # docs/families.md, Kimi-K2.5

GPUs: 8, on each a rank of the trainer (TP 8, EP 8) and a rank of one engine (TP 8, EP 8), which
take turns and hold all but norms and routers once, the experts as vLLM lays them out for its Marlin
kernels. By the plan a trainer rank holds 32 GiB of 139, beside an engine rank of 104, with room for
23 sequences of 16,384 tokens. Every linear has an adapter of rank 16, each expert its own.

No GPU has run this, nor a base that is held once on any (docs/held_once.md says what was tested
without). Watch `mismatch/kl`, which INT4 leaves as small as a base of bfloat16 does, and
`replay/coverage`.
"""

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.planner.hardware import Hardware

hardware = Hardware(gpus=8, gpu="h200")

config = RunConfig(
    name="kimi_k2_thinking",
    model=ModelConfig(
        path="moonshotai/Kimi-K2-Thinking", max_length=16384, held_once="on",
        trust_remote_code=True,  # its tokenizer is a file of Moonshot's
    ),
    adapter=AdapterConfig(rank=16, alpha=32),
    trainer=TrainerConfig(
        steps=200, world_size=8, tp=8, ep=8, device="cuda", recompute="full",
        micro_batch_tokens=16384, lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=1, tp=8, ep=True, max_response_tokens=14336, max_num_seqs=64,
        gpu_memory_utilization=0.75, start_timeout_s=7200,
    ),
    placement=PlacementConfig(mode="colocated"),
    algorithm=AlgorithmConfig(prompts_per_step=16, group_size=8),
    data=DataConfig(
        path="open-r1/DAPO-Math-17k-Processed", subset="en", answer_key="solution",
        chat_template=True,
    ),
    reward=RewardConfig(function="lora_moe_rl.rewards:math_verify"),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
