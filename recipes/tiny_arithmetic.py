"""A tiny Mixture-of-Experts model learns to add and subtract from reward alone.

    python recipes/tiny_arithmetic.py
    python recipes/tiny_arithmetic.py model=deepseek_v3 trainer.lr=1e-3 adapter.rank=8

It begins with about a third of its answers right (sampled at temperature 1); watch `reward/mean`
rise by more than 0.25 within the 40 steps. Two Megatron ranks share the experts (EP 2).
"""

from collections.abc import Iterator

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.tiny.arithmetic import problems


def rows(seed: int) -> Iterator[dict]:
    """Problems for ever: {"prompt": "23+58=", "answer": "81"}."""
    for prompt, answer in problems(seed):
        yield {"prompt": prompt, "answer": answer}


def reward(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 for the right digits and nothing else, otherwise 0."""
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]


config = RunConfig(
    name="tiny_arithmetic",
    model=ModelConfig(path="qwen3_moe"),
    adapter=AdapterConfig(rank=16, alpha=32),
    trainer=TrainerConfig(steps=40, world_size=2, ep=2, lr=1.5e-3, warmup_steps=2),
    data=DataConfig(generator=f"{__file__}:rows"),
    reward=RewardConfig(function=f"{__file__}:reward"),
)

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
