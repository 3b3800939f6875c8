"""Qwen3-30B-A3B learns from a larger teacher by on-policy distillation, on one node of 8 GPUs of 80
GB: it writes, the teacher says of each token how likely it finds it.

    python recipes/opd_30b.py algorithm.teacher_url=http://host:8000/v1
    vllm serve Qwen/Qwen3-235B-A22B --tensor-parallel-size 8      # the teacher, on GPUs of its own

With algorithm=distillation the teacher also says which 20 tokens it finds likeliest in its place.

There is no reward function: prompts are all that is needed. Teacher and student must have one
tokenizer.

GPUs: 4 for the trainer (EP 4), 4 for two engines of TP 2. By the plan a trainer rank holds 30
GiB of 79, an engine rank 71, with room for 96 sequences of 8,192 tokens. Not run yet. The
teacher's GPUs are not among them.

Watch `teacher/reverse_kl` fall, and `time/reward`, which is what the run waits for the teacher.
"""

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.planner.hardware import Hardware

hardware = Hardware(gpus=8, gpu="h100")

config = RunConfig(
    name="opd_30b",
    model=ModelConfig(path="Qwen/Qwen3-30B-A3B", max_length=8192),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=4, ep=4, device="cuda", recompute="full", micro_batch_tokens=8192,
        lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=2, tp=2, ep=True, max_response_tokens=6144, gpu_memory_utilization=0.9
    ),
    algorithm={
        "name": "opd", "prompts_per_step": 64, "group_size": 4,
        "teacher_url": "http://127.0.0.1:8000/v1", "teacher_model": "Qwen/Qwen3-235B-A22B",
    },
    data=DataConfig(
        path="open-r1/DAPO-Math-17k-Processed", subset="en", answer_key="solution",
        chat_template=True,
    ),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
