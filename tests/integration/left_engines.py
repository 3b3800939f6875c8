"""Engines in which no token ends a sample, and which tell whether vLLM has anything to do."""

from __future__ import annotations

from typing import Any

import openai
from spoken_source import client, listening

from lora_moe_rl.endpoint.engine import Served, ServingEngine
from lora_moe_rl.endpoint.sessions import Sessions
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.engine import RolloutEngine

LEAVES_AFTER_S = 1.0


class EndlessEngine(RolloutEngine):
    async def start(self) -> dict[str, Any]:
        facts = await super().start()
        self.sampling = outputs.sampling_params(self.config, set())
        self.sampling.ignore_eos = True
        return facts

    async def core_is_free(self) -> bool:
        """vLLM forgets its prefix cache only when no request holds a block of it."""
        return await self.llm.reset_prefix_cache()


class LeftEngine(EndlessEngine, ServingEngine):
    """What `lora-moe-rl serve` serves, and a client that does not wait."""

    async def left(self, max_tokens: int) -> dict[str, Any]:
        """A client asks for many tokens and goes; another asks for a few. What is there then."""
        sessions = Sessions(None, Served(self, self.config, None))
        async with listening(sessions) as (endpoint, at):
            agent = client(at, "none").with_options(timeout=LEAVES_AFTER_S)
            asked = {"model": "base", "prompt": "2+3="}
            try:
                await agent.completions.create(**asked, max_tokens=max_tokens)
            except openai.APITimeoutError:
                short = await client(at, "none").completions.create(**asked, max_tokens=4)
            return {
                "tokens": short.usage.completion_tokens,
                "gone": endpoint.gone,
                "running": sum(self.running.values()),
                "free": await self.core_is_free(),
            }
