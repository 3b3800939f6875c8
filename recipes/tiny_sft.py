"""A tiny Mixture-of-Experts model is shown sums before it is rewarded for them: a warm start.

    python recipes/tiny_sft.py
    python recipes/tiny_arithmetic.py adapter.init_from=runs/tiny_sft-qwen3_moe

The rows hold the answers, so that no engine starts. Watch `loss/nll` fall from 0.50 to about 0.25
in the first ten steps; the second command goes on from this adapter by reinforcement learning.
"""

from collections.abc import Iterator

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.tiny.arithmetic import problems


def rows(seed: int) -> Iterator[dict]:
    """Solved problems for ever: {"prompt": "23+58=", "completion": "81"}."""
    for prompt, answer in problems(seed):
        yield {"prompt": prompt, "completion": answer}


config = RunConfig(
    name="tiny_sft",
    model=ModelConfig(path="qwen3_moe", max_length=32),
    adapter=AdapterConfig(rank=16, alpha=32),
    trainer=TrainerConfig(steps=40, world_size=2, ep=2, lr=1.5e-3, warmup_steps=2),
    algorithm=AlgorithmConfig(name="sft", prompts_per_step=64),
    data=DataConfig(generator=f"{__file__}:rows"),
)

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
