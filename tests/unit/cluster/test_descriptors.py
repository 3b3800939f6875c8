"""What stays open in the run's own process of actors that were started anew: nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from contextlib import suppress

import pytest
from engine_group import fate

from lora_moe_rl.errors import EngineDied

pytestmark = pytest.mark.seconds  # Ray is started for them


def pidfds() -> int:
    """By which this process watches others."""
    gc.collect()
    names = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("pidfd" in name for name in names)


def test_engines_that_are_started_anew_leave_no_descriptor(start, tmp_path):
    engines = start(engines=1, max_restarts=4)

    async def lost():
        fate(tmp_path, 0, "sample", "exit")
        with pytest.raises(EngineDied):
            await engines.policy(3, seed=0).sample([0], n=1)
        await engines.all_back()

    def watched() -> int:
        while engines.actors[0].pid is None:
            time.sleep(0.05)
        return pidfds()

    before = watched()
    for _ in range(3):
        asyncio.run(lost())
        assert watched() == before
    assert engines.restarts == 3
