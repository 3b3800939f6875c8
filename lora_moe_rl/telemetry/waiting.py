"""Where a task of an event loop waits."""

from __future__ import annotations

import asyncio
from types import FrameType
from typing import Any


def frames_of(task: asyncio.Task[Any]) -> list[FrameType]:
    """The frames of a task's coroutines that wait for each other, the outermost first, as far as
    they are known: Python's own `Task.get_stack` has the first alone."""
    coroutine: Any = task.get_coro()
    frames = []
    while coroutine is not None:
        if (frame := getattr(coroutine, "cr_frame", None)) is not None:
            frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None)
    return frames
