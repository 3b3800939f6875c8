"""Rewards are plain Python functions; these are there already.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

is called once for each prompt with all its samples, as TRL does it: `completions` are the texts of
the samples, `completion_ids` their token ids, and every column of the data is a keyword whose value
is repeated for each sample (`answer` is the column that `data.answer_key` names). For a prompt that
is a list of messages a completion is one too: `[{"role": "assistant", "content": text}]`, or of
several turns all that was said after the prompt. A function gets those of the keywords that it
names, or all if it takes `**kwargs`, TRL's `trainer_state`, `log_extra` and `log_metric` among
them. It may be async. verl's functions are called in their own style.

None means that the reward does not apply to this sample: it is left out of the loss.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lora_moe_rl.rewards.builtin import exact_match, number_match

if TYPE_CHECKING:
    from lora_moe_rl.rewards.judge import Judge
    from lora_moe_rl.rewards.mathematics import math_verify
    from lora_moe_rl.rewards.reasoning import reasoning_gym

__all__ = ["Judge", "exact_match", "math_verify", "number_match", "reasoning_gym"]

# What needs a library that takes time to import, or that is not there, by the module it is in.
LATE = {"Judge": "judge", "math_verify": "mathematics", "reasoning_gym": "reasoning"}


def __getattr__(name: str) -> Any:
    """Imports a reward of LATE only when it is asked for."""
    if name in LATE:
        return getattr(import_module(f"lora_moe_rl.rewards.{LATE[name]}"), name)
    raise AttributeError(name)
