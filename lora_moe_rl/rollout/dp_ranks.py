"""Calls on the workers of all of an engine's data-parallel ranks.

vLLM's own call (`vllm/v1/engine/core_client.py`, DPLBAsyncMPClient.call_utility_async) reaches all
of them too, but gives what those of the first rank answer: of a worker elsewhere that says no,
nothing would be heard.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from lora_moe_rl.upstream.checks import require_parameters, require_version

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

WHO = "lora_moe_rl/rollout/dp_ranks.py"


def check_vllm() -> None:
    """Raises ConfigError when the vLLM that is installed is not as this file expects."""
    require_version("vllm", WHO)
    from vllm.v1.engine.core_client import AsyncMPClient

    require_parameters(AsyncMPClient._call_utility_async, ("self", "method", "args", "engine"), WHO)
    call = AsyncMPClient.collective_rpc_async
    require_parameters(call, ("self", "method", "timeout", "args", "kwargs"), WHO)


async def every_worker(llm: AsyncLLM, method: str, timeout: float, args: tuple) -> list[Any]:
    """What the workers answer, rank by rank."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    client = llm.engine_core
    assert isinstance(client, DPLBAsyncMPClient), "an engine of several data-parallel ranks"
    asked = ("collective_rpc", method, timeout, args, None)
    calls = [client._call_utility_async(*asked, engine=core) for core in client.core_engines]
    return [answer for answers in await asyncio.gather(*calls) for answer in answers]
