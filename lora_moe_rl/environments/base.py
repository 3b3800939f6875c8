"""What an environment is: it takes a prompt, asks the policy, and returns samples with rewards."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

from lora_moe_rl.config import EnvironmentConfig, RunConfig
from lora_moe_rl.config.plugins import ALGORITHMS, Plugin
from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.environments.parts.conversation import Conversation
from lora_moe_rl.ports import Policy, Rewards


def why_no_forks(config: RunConfig) -> str | None:
    """Why conversations that became several samples cannot be trained on; None where they can."""
    algorithm = ALGORITHMS.find(config.algorithm.name)
    if algorithm(config.algorithm, config.max_response_tokens).takes_forks:
        return None
    return (
        f"algorithm={config.algorithm.name}, as it is set, has no one advantage for all samples of "
        "a conversation (a critic, a teacher, algorithm.kl_in=reward, a discount or "
        "algorithm.advantage=turns or gigpo give tokens their own); use one that has, as grpo"
    )


class Environment(Plugin):
    """Base of all environments. `rewards` score a prompt by the function of its data set,
    `group_size` are the samples wanted of each prompt, `tokenizer` is the model's."""

    Settings: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    # Whether it may give rewards by itself, so that a run may have no reward function; and whether
    # reward functions are shown environments, which are not there before the run.
    rewards_itself: ClassVar[bool] = False
    shows_itself: ClassVar[bool] = False
    # Whether the samples of an eval set may be longer or shorter than those of training.
    bounds_sets: ClassVar[bool] = True
    # Whether what talks to the policy may change what was said before, so that a conversation
    # becomes several samples (a fork).
    forks: ClassVar[bool] = False
    # Whether it has chats of its own, which the chat template renders whatever the prompts are.
    has_chats: ClassVar[bool] = False
    # Whether every conversation begins with the row's prompt and nothing else.
    begins_with_row: ClassVar[bool] = True
    # Whether every sample is one turn of the policy.
    one_turn: ClassVar[bool] = False

    def __init__(self, config: RunConfig, rewards: Rewards, tokenizer: Any):
        self.config, self.rewards, self.tokenizer = config, rewards, tokenizer
        self.settings, self.group_size = config.environment, config.algorithm.group_size
        self.max_response_tokens = config.rollout.max_response_tokens
        self.no_forks = why_no_forks(config)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        """All samples of a prompt, scored. Called for many prompts at the same time.

        A sample that failed has reward NaN and a line in the group's failures. What is raised ends
        the run.
        """
        raise NotImplementedError

    def held_out(self, group_size: int, max_response_tokens: int | None) -> Self:
        """The same environment for an eval set, with another number of samples of each prompt, and
        another bound of their responses (None: that of training); it shares all that this one has
        started, which this one ends."""
        other = copy.copy(self)
        other.group_size = group_size
        other.no_forks = None  # nothing is trained on
        if max_response_tokens is not None:
            other.max_response_tokens = max_response_tokens
        return other

    def conversation(self, prompt: Prompt, policy: Policy, place: int) -> Conversation:
        """A new conversation with the policy, the one at `place` of the group."""
        lengths = self.config.model.max_length, self.max_response_tokens
        made = Conversation(policy, place, prompt.token_ids, *lengths)
        made.no_forks = self.no_forks
        return made

    @property
    def prompt_tokenizer(self) -> Any:
        """What renders prompts: the model's tokenizer, or one that tells of more in its chat
        template."""
        return self.tokenizer

    @property
    def about(self) -> str:
        """What `check` says of it, if anything."""
        return ""

    def close(self) -> None:
        """Ends what it has started."""
