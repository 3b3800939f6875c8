"""A tiny Mixture-of-Experts model works in two turns: it adds, a tool wants 7 more, it adds again.

    python recipes/tiny_tools.py
    python recipes/tiny_tools.py model=deepseek_v3 trainer.lr=1e-3 adapter.rank=8

    23+58=  81   81+7=  88
    prompt  turn tool   turn      only what the policy wrote is trained

The tiny models write digits and nothing else, so that a number is what calls the tool: the form of
calls is `number` below (models that were trained for tools write `environment.calls=json`). Each
turn that is right is worth a half. Watch `reward/mean`, and that `mismatch/kl` stays at rounding:
the routes of both turns are replayed.
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
    """The mean of both turns: of the sum, and of what is seven more than the sum that was said."""
    found = []
    for messages, expected in zip(completions, answer, strict=True):
        said = messages[0]["content"]
        second = messages[-1]["content"] if len(messages) > 1 else ""
        wanted = str(int(said) + 7) if said.isdecimal() else "no number was said"
        found.append((score(said, expected) + score(second, wanted)) / 2)
    return found


def score(text: str, expected: str) -> float:
    """1 for the right digits, otherwise up to a half: the share of digits that are in place."""
    same = sum(one == other for one, other in zip(text, expected, strict=False))
    return 1.0 if text == expected else 0.5 * same / max(len(text), len(expected))


config = RunConfig(
    name="tiny_tools",
    model=ModelConfig(path="qwen3_moe", chat_template=TEMPLATE),
    adapter=AdapterConfig(rank=16, alpha=32),
    trainer=TrainerConfig(steps=100, world_size=2, ep=2, lr=1.5e-3, warmup_steps=2),
    rollout=RolloutConfig(max_response_tokens=40),
    environment=Tools.Settings(
        name="tools",
        tools=(f"{__file__}:seven_more",),
        calls=f"{__file__}:number",
        max_turns=2,
        max_turn_tokens=5,
        answer_role="user",
    ),
    data=DataConfig(generator=f"{__file__}:rows"),
    reward=RewardConfig(function=f"{__file__}:reward"),
)

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
