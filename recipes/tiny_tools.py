"""A tiny Mixture-of-Experts model works in three turns: it adds, a tool wants 7 more, twice.

    python recipes/tiny_tools.py
    python recipes/tiny_tools.py model=deepseek_v3-turns trainer.lr=1e-3 adapter.rank=8

    23+58=  81   81+7=  88   88+7=  95
    prompt  turn tool   turn tool   turn      only what the policy wrote is trained

The tiny models write digits and nothing else, so that a number is what calls the tool: the form of
calls is `number` below (models that were trained for tools write `environment.calls=json`). These
two were pre-trained on three problems in a row. Each turn that is right is worth a third. Watch
`reward/mean`, and that `mismatch/kl` stays at rounding: the routes of all turns are replayed.
"""

from collections.abc import Iterator

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.environments.parts.tool_calls import Call, ParseError
from lora_moe_rl.environments.tools import Tools
from lora_moe_rl.tiny.arithmetic import problems

TURNS = 3
# Only what is said: no roles, and no system prompt that tells of the tool.
TEMPLATE = (
    "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
)


def seven_more(number: int) -> str:
    """
    Asks for a number and seven.

    Args:
        number: A whole number.
    """
    return f"{number}+7="


def number(text: str) -> list[Call]:
    """Write a whole number."""
    if not text.isdecimal():
        raise ParseError("not a whole number")
    return [Call("seven_more", [text])]


def rows(seed: int) -> Iterator[dict]:
    """Problems for ever, as messages: {"prompt": [...], "answer": "81"}."""
    for prompt, answer in problems(seed):
        yield {"prompt": [{"role": "user", "content": prompt}], "answer": answer}


def reward(completions: list[list[dict]], answer: list[str], **_) -> list[float]:
    """The share of turns that are right: the sum first, then seven more than was said before."""
    return [
        right_turns([one["content"] for one in messages if one["role"] == "assistant"], expected)
        / TURNS
        for messages, expected in zip(completions, answer, strict=True)
    ]


def right_turns(said: list[str], expected: str) -> int:
    wanted = [expected, *(str(int(text) + 7) if text.isdecimal() else None for text in said[:-1])]
    return sum(text == right for text, right in zip(said, wanted, strict=True))


config = RunConfig(
    name="tiny_tools",
    model=ModelConfig(path="qwen3_moe-turns", chat_template=TEMPLATE),
    adapter=AdapterConfig(rank=16, alpha=32),
    trainer=TrainerConfig(steps=60, world_size=2, ep=2, lr=1.5e-3, warmup_steps=2),
    rollout=RolloutConfig(max_response_tokens=40),
    environment=Tools.Settings(
        name="tools",
        tools=(f"{__file__}:seven_more",),
        calls=f"{__file__}:number",
        max_turns=TURNS,
        max_turn_tokens=5,
        answer_role="user",
    ),
    data=DataConfig(generator=f"{__file__}:rows"),
    reward=RewardConfig(function=f"{__file__}:reward"),
)

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
