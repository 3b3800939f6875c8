"""Waiting for an engine's answer as long as the engine gets on with something (`pulse.py`)."""

from __future__ import annotations

import asyncio
from typing import Any

from lora_moe_rl.cluster import stacks
from lora_moe_rl.cluster.actors import Actor, answer
from lora_moe_rl.cluster.pulse import UNHEARD, Pulse
from lora_moe_rl.errors import EngineSilent, LoraMoeRlError
from lora_moe_rl.ports import Ref


async def heard(actor: Actor, ref: Ref, pulse: Pulse) -> Any:
    """What an engine answers to a request, however long that takes, as long as it does something
    about one of those that it has. Raises EngineSilent when it does not, whether or not it answers
    other questions; its stacks are in its log then."""
    waiting = asyncio.ensure_future(answer(actor, ref))
    pulse.begin()
    try:
        while not (await asyncio.wait([waiting], timeout=pulse.every_s))[0]:
            if pulse.due():
                await _listen(actor, pulse)
            if pulse.silent:
                raise EngineSilent(
                    "none of its requests got a token or ended in rollout.silent_s="
                    f"{pulse.silent_s:g} s"
                )
        return waiting.result()
    finally:
        pulse.end()
        waiting.cancel()


async def _listen(actor: Actor, pulse: Pulse) -> None:
    try:
        pulse.heard(await answer(actor, actor.remote("pulse"), pulse.every_s))
    except LoraMoeRlError:  # of a death the request itself tells
        pulse.heard(UNHEARD)
    if pulse.silent:
        await asyncio.to_thread(stacks.dump, [actor.place])
