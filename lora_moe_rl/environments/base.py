"""What an environment is: it takes a prompt, asks the policy, and returns samples with rewards."""

from __future__ import annotations

from typing import ClassVar

from lora_moe_rl.config import EnvironmentConfig
from lora_moe_rl.config.plugins import Plugin
from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.ports import Policy, Rewards


class Environment(Plugin):
    """Base of all environments. `rewards` score a prompt by the function of its data set,
    `group_size` are the samples wanted of each prompt."""

    Settings: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig

    def __init__(self, settings: EnvironmentConfig, rewards: Rewards, group_size: int):
        self.settings, self.rewards, self.group_size = settings, rewards, group_size

    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        """All samples of a prompt, scored. Called for many prompts at the same time.

        A sample that failed has reward NaN and a line in the group's failures. What is raised ends
        the run.
        """
        raise NotImplementedError
