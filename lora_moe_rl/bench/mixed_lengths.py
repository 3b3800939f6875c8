"""An environment whose responses are as long as their rows say, whatever the policy writes."""

from __future__ import annotations

from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.ports import Policy, Turn


class MixedLengths(Environment):
    """Rows have a column `tokens`: the longest answer of that prompt. With a model that never ends
    a response by itself each has just so many."""

    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        turn = Turn(conversation=0, number=0, recorded=0, max_tokens=prompt.columns["tokens"])
        samples, routes = await policy.sample(prompt.token_ids, self.group_size, turn)
        return Group(prompt, samples, routes, *await self.rewards.score(prompt, samples))
