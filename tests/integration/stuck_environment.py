"""An environment that waits for somebody who never comes, from the third prompt on."""

from __future__ import annotations

import asyncio

from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.environments.single_turn import SingleTurn
from lora_moe_rl.ports import Policy


class Stuck(SingleTurn):
    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        if prompt.number >= 2:
            await self.never_comes()
        return await super().rollout(prompt, policy)

    async def never_comes(self) -> None:
        await asyncio.Event().wait()
