"""The watchdog of a run's own loops: that nothing happens, nothing is under way and nothing is
raised is a failure too.

    something happened, or is under way ──> wait on
    neither, for faults.stall_s         ──> stacks of all processes into logs/, StallError

What asks an engine, a rank, a reward or a tool has a time-out of its own; this one finds what waits
for somebody who will never come.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import StallError
from lora_moe_rl.telemetry.waiting import frames_of

LOOKS = 10  # in vain, over the time after which a run counts as stuck
SHOWN = 8  # tasks that the error names, of each place one


def patience(config: RunConfig) -> float:
    """Seconds without anything after which a run is stuck: faults.stall_s, and the longest that a
    reward, a tool or a teacher may take, since nothing else says that these are under way."""
    sections = (config.reward, config.environment, config.algorithm)
    ends = ("timeout_s", "patience_s")  # the latter: of all the tries of one that is asked
    own = [value for part in sections for name, value in part if name.endswith(ends)]
    return config.faults.stall_s + max(own, default=0.0)


class Stall:
    """`progress` is equal as long as nothing happens; `under_way` names what is; `waits`: what is
    waited for, and by how many, empty when the loops do not run yet. `dump` writes stacks, and says
    where they are."""

    def __init__(
        self,
        patience_s: float,
        progress: Callable[[], Hashable],
        under_way: Callable[[], Sequence[str]],
        waits: Callable[[], Counter[str]],
        dump: Callable[[], str],
    ):
        self.patience_s, self.progress, self.under_way = patience_s, progress, under_way
        self.waits, self.dump = waits, dump
        self._last, self._in_vain = progress(), 0

    def look(self) -> None:
        """Raises StallError when a run is stuck. Looks are counted, not seconds: an event loop that
        was blocked meanwhile has not looked."""
        found, waits = self.progress(), self.waits()
        self._in_vain += 1
        if found != self._last or self.under_way() or not waits:
            self._last, self._in_vain = found, 0
        if self._in_vain < LOOKS:
            return
        waited = ", ".join(f"{what} ({count})" for what, count in waits.items())
        raise StallError(
            f"nothing has happened for {self.patience_s:g} s (faults.stall_s), and nothing is "
            f"under way; waited for: {waited}; the run's tasks stand at {places()}. {self.dump()}. "
            "The run can go on with --resume"
        )

    async def watched(self, work: Coroutine[Any, Any, None]) -> None:
        """`work`, as long as it is not stuck."""
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._watch())
        both = {working, watching}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
        for task in (watching, working):
            if not task.cancelled():
                task.result()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.patience_s / LOOKS)
            self.look()


def places() -> str:
    """Where the event loop's tasks wait, each place once: `learn > next_step (run/tickets.py:152)`.
    To be called in a task, which is left out."""
    found = Counter(place_of(task) for task in asyncio.all_tasks() - {asyncio.current_task()})
    return "; ".join(
        f"{count} x {place}" if count > 1 else place for place, count in found.most_common(SHOWN)
    )


def place_of(task: asyncio.Task[Any]) -> str:
    """The coroutines of a task that wait for each other, as far as they are known, and the line of
    the last."""
    frames = frames_of(task)
    if not frames:
        return task.get_name()
    path = Path(frames[-1].f_code.co_filename)
    calls = " > ".join(frame.f_code.co_name for frame in frames)
    return f"{calls} ({path.parent.name}/{path.name}:{frames[-1].f_lineno})"
