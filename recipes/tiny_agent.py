"""A tiny Mixture-of-Experts model is trained through an agent of one's own, a program that speaks
OpenAI's protocol: recipes/agents/adds_twice.py.

    python recipes/tiny_agent.py
    python recipes/tiny_agent.py environment.processes=2 trainer.steps=20

    23+58=  81   81+7=  88
    prompt  turn agent  turn      only what the policy wrote is trained

The agent sets the rewards itself, so that the run has no reward function. Watch `reward/mean`, that
`environment/forks` stays 0 (each chat goes on from the last, token for token), and that
`mismatch/kl` stays at rounding: the routes of both turns are replayed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.environments.external import External
from lora_moe_rl.tiny.arithmetic import problems

AGENT = Path(__file__).parent / "agents/adds_twice.py"
# Only what is said: the tiny models were trained on sums alone, without roles, and without a system
# prompt that tells of tools.
TEMPLATE = (
    "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
)


def rows(seed: int) -> Iterator[dict]:
    """Problems for ever, as messages: {"prompt": [...], "answer": "81"}."""
    for prompt, answer in problems(seed):
        yield {"prompt": [{"role": "user", "content": prompt}], "answer": answer}


config = RunConfig(
    name="tiny_agent",
    model=ModelConfig(path="qwen3_moe", chat_template=TEMPLATE),
    adapter=AdapterConfig(rank=16, alpha=32),
    trainer=TrainerConfig(steps=100, world_size=2, ep=2, lr=1.5e-3, warmup_steps=2),
    rollout=RolloutConfig(max_response_tokens=40),
    environment=External.Settings(
        name="external", command=f"{sys.executable} {AGENT}", processes=4, timeout_s=120
    ),
    data=DataConfig(generator=f"{__file__}:rows"),
)

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
