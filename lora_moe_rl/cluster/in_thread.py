"""A call that blocks, while an event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


async def in_thread[T](name: str, call: Callable[[], T]) -> T:
    """What `call` returns or raises, in a thread of its own, which the end of the program does not
    wait for: a run that is ended at once ends. Who waits and is cancelled leaves it to its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(found: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(found)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        found, error = None, None
        try:
            found = call()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, found, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
