"""Several turns with tools: the policy calls Python functions, reads their answers, and answers.

How a turn goes is in parts/tool_talk.py, how a conversation ends in parts/endings.py. The reward
function scores its last turn, however the policy came to it. A tool that raises, hangs or answers
nonsense (tool_error) is the policy's business: it is told. Only when tools cannot be called at all
has the conversation failed (environment_error).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lora_moe_rl.calls.pool import NoWorker
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.environments.parts.conversation import Conversation, finish, together
from lora_moe_rl.environments.parts.endings import Failed, no_counts, tried
from lora_moe_rl.environments.parts.templates import Introduced
from lora_moe_rl.environments.parts.tool_calls import Call
from lora_moe_rl.environments.parts.tool_talk import ToolSettings, ToolTalk
from lora_moe_rl.environments.parts.toolbox import Toolbox
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.ports import Policy, Rewards


class Tools(Environment):
    class Settings(ToolSettings):
        pass

    settings: Settings

    def __init__(self, config: RunConfig, rewards: Rewards, tokenizer: Any):
        super().__init__(config, rewards, tokenizer)
        settings = self.settings
        if not settings.tools:
            raise ConfigError(
                "environment=tools has no tools: set environment.tools to functions, as "
                "[file.py:function, …]"
            )
        self.talk = ToolTalk(config, settings, tokenizer)
        self.toolbox = Toolbox(
            settings.tools, settings.tool_workers, settings.tool_timeout_s,
            settings.max_output_chars,
        )  # fmt: skip
        self.introduced = Introduced(tokenizer, self.toolbox.schemas, self.talk.form)

    @property
    def prompt_tokenizer(self) -> Any:
        return self.introduced

    @property
    def about(self) -> str:
        return self.introduced.about

    def close(self) -> None:
        self.toolbox.close()

    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        counts = no_counts()

        async def talk(one: Conversation, own: Counter[str]) -> str:
            return await self.talk.until_the_end(prompt, one, self.introduced, self._call, own)

        talks = [
            tried(
                lambda i=i: self.conversation(prompt, policy, i),
                talk,
                self.settings.retries,
                counts,
            )
            for i in range(self.group_size)
        ]
        return await finish(prompt, policy, await together(talks), self.rewards, counts)

    async def _call(self, call: Call) -> tuple[bool, str]:
        try:
            return await self.toolbox.call(call)
        except NoWorker as error:
            raise Failed("environment_error", f"environment.tools {error}") from error
