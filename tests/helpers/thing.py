"""What processes of `verify` hold in tests; by itself, so that they find it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

HANGS_S = 600


class Thing:
    def __init__(self, index: int, folder: Path):
        self.index, self.folder = index, folder

    def ids(self) -> tuple[int, int]:
        return self.index, os.getpid()

    def variable(self) -> str | None:
        return os.environ.get("THING")

    async def loop(self) -> int:
        await asyncio.sleep(0)
        return id(asyncio.get_running_loop())

    def fail(self, error: Exception) -> None:
        raise error

    def die(self) -> None:
        print("the last words", flush=True)
        os._exit(3)

    def hang(self) -> None:
        time.sleep(HANGS_S)

    def hang_but_one(self) -> None:
        if self.index:
            raise ValueError("one of two")
        time.sleep(HANGS_S)

    async def shutdown(self) -> None:
        (self.folder / f"ended-{self.index}").touch()
