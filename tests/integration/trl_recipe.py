"""A recipe: the tiny model adds, an environment of TRL's kind wants seven more, it adds again."""

from collections.abc import Iterator

from lora_moe_rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.environments.parts.tool_calls import Call, ParseError
from lora_moe_rl.environments.trl import Trl
from lora_moe_rl.tiny.arithmetic import problems

TEMPLATE = (
    "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
)


class SevenMore:
    """Each right number is worth a half."""

    def reset(self, answer, **kwargs) -> str:
        self.wanted, self.right = answer, 0
        return "="

    def get_reward(self) -> float:
        return self.right / 2

    def seven_more(self, number: int) -> str:
        """
        Asks for a number and seven.

        Args:
            number: A whole number.
        """
        self.right = min(2, self.right + (str(number) == self.wanted))
        self.wanted = str(number + 7)
        return f"{number}+7="


class ByTurn(SevenMore):
    """Each right number is worth a half, at its turn."""

    get_reward = None

    def reset(self, answer, **kwargs) -> str:
        self.before = 0
        return super().reset(answer, **kwargs)

    def get_turn_reward(self) -> float:
        before, self.before = self.before, self.right
        return (self.right - before) / 2


class ByState(ByTurn):
    """It tells of the state after an even number, and leaves the others at what was shown."""

    def reset(self, answer, **kwargs) -> str:
        self.last = 1
        return super().reset(answer, **kwargs)

    def seven_more(self, number: int) -> str:
        """
        Asks for a number and seven.

        Args:
            number: A whole number.
        """
        self.last = number
        return super().seven_more(number)

    def get_turn_state(self) -> str | None:
        return None if self.last % 2 else "even"


def number(text: str) -> list[Call]:
    """Write a whole number."""
    if not text.isdecimal():
        raise ParseError("not a whole number")
    return [Call("seven_more", [text])]


def rows(seed: int) -> Iterator[dict]:
    for prompt, answer in problems(seed):
        yield {
            "prompt": [{"role": "user", "content": prompt.removesuffix("=")}],
            "answer": answer,
        }


config = RunConfig(
    name="trl",
    model=ModelConfig(path="qwen3_moe", chat_template=TEMPLATE),
    adapter=AdapterConfig(rank=16, alpha=32),
    algorithm=AlgorithmConfig(prompts_per_step=4, group_size=4),
    trainer=TrainerConfig(steps=2, world_size=1, lr=1e-3),
    rollout=RolloutConfig(max_response_tokens=40),
    environment=Trl.Settings(
        name="trl",
        factory=f"{__file__}:SevenMore",
        calls=f"{__file__}:number",
        max_turns=3,
        max_turn_tokens=5,
        answer_role="user",
        mask_parse_errors=True,
        tool_timeout_s=120,
    ),
    data=DataConfig(generator=f"{__file__}:rows"),
)
