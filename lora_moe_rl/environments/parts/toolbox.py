"""A run's tools: their schemas, and calling them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from lora_moe_rl.calls.pool import NoWorker, Pool, WorkerLost
from lora_moe_rl.environments.parts.tool_calls import Call
from lora_moe_rl.environments.parts.tool_worker import load_tools
from lora_moe_rl.errors import ConfigError


class Toolbox:
    """Tools named as `file.py:function` or `module:function`: typed, with a docstring in Google's
    style. They are called in processes of their own; `close` ends these.

    Raises ConfigError for a tool that cannot be imported, or of which no JSON schema can be made.
    """

    def __init__(self, specs: Sequence[str], workers: int, timeout_s: float, max_chars: int):
        module, words = "lora_moe_rl.environments.parts.tool_worker", [str(max_chars), *specs]
        try:
            # First: a file that ends or hangs the process that imports it is seen here.
            self.pool = Pool(
                module, words, workers, timeout_s, "environment.tool_timeout_s", quiet=True
            )
        except WorkerLost as error:
            raise ConfigError(f"environment.tools={', '.join(specs)}: {error}") from error
        try:
            self.schemas = schemas_of(specs)
        except ConfigError:
            self.close()
            raise

    async def call(self, call: Call) -> tuple[bool, str]:
        """Whether the tool did its work, and its answer; or else what went wrong. Raises NoWorker
        when there is no process left to call it in, and none can be started."""
        asked = {"name": call.name, "positional": call.positional, "named": call.named}
        try:
            pickle.dumps(asked)  # as it is sent; a model may nest its arguments as deep as it likes
        except Exception as error:
            return False, f"the arguments of {call.name} cannot be sent: {error}"
        try:
            done, text = await self.pool.call(asked)
        except NoWorker:
            raise
        except WorkerLost as error:
            return False, f"{call.name} {error}"
        return done, text

    def close(self) -> None:
        self.pool.close()


def schemas_of(specs: Sequence[str]) -> list[dict[str, Any]]:
    """The tools as chat templates want them, by transformers. Raises ConfigError."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for spec, function in zip(specs, load_tools(list(specs)).values(), strict=True):
        try:
            found.append(get_json_schema(function))
        except Exception as error:  # transformers has a class for each fault
            raise ConfigError(
                f"environment.tools: no JSON schema can be made of {spec}: {error}; a tool needs a "
                "type for each argument, and a docstring with an Args section in Google's style"
            ) from error
    return found
