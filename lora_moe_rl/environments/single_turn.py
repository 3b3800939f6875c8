"""One prompt, one response, one reward."""

from __future__ import annotations

from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.ports import Policy


class SingleTurn(Environment):
    one_turn = True

    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        samples, routes = await policy.sample(prompt.token_ids, self.group_size)
        return Group(prompt, samples, routes, *await self.rewards.score(prompt, samples))
