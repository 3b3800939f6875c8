"""Qwen3-30B-A3B learns to write short, clear answers, by its own base as a judge, on one node of 8
GPUs of 80 GB.

    python recipes/judge_30b.py data.path=mine.jsonl
    python recipes/judge_30b.py reward.functions.good.args.url=http://host:8000/v1 \\
        reward.functions.good.args.model=NAME                        # another judge, at a server

Rows are {"prompt": ...}; the eight of recipes/data/writing_small.jsonl show the form. The judge is
the model as it was before training, on the run's own engines. A second reward, of a tenth of the
weight, wants no more than 200 words.

GPUs: 4 for the trainer (EP 4), 4 for two engines of TP 2. By the plan a trainer rank holds 30
GiB of 79, an engine rank 71, with room for 96 sequences of 8,192 tokens. Not run yet.

Watch `reward/good/mean` beside `reward/short/mean` and `rollout/response_length`, and read samples:
what a judge likes is not always what you want.
"""

from pathlib import Path

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

WORDS = 200


def short(completions: list, **_) -> list[float]:
    """1 for an answer of at most WORDS words, otherwise 0."""
    texts = (one if isinstance(one, str) else one[-1]["content"] for one in completions)
    return [float(len(text.split()) <= WORDS) for text in texts]


hardware = Hardware(gpus=8, gpu="h100")
DATA = Path(__file__).parent / "data"

config = RunConfig(
    name="judge_30b",
    model=ModelConfig(path="Qwen/Qwen3-30B-A3B", max_length=8192),
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
        path=str(DATA / "writing_small.jsonl"), chat_template=True,
        chat_template_kwargs={"enable_thinking": False},
    ),
    reward=RewardConfig(
        functions={
            "good": {
                "function": "lora_moe_rl.rewards:Judge",
                "args": {"url": "engines", "model": "base", "options": {"max_tokens": 512}},
            },
            "short": {"function": f"{__file__}:short", "weight": 0.1},
        },
        timeout_s=300,
    ),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
