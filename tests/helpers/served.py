"""A service that listens on loopback in a thread, and the real SDK as its client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from pretended_backend import PretendedBackend

from lora_moe_rl.endpoint.listening import Listening
from lora_moe_rl.service.app import Service
from lora_moe_rl.service.folders import Folders

KEY = "tml-of-these-tests"


class Served:
    """`call` runs a function in the service's event loop."""

    def __init__(self, service: Service, backend: PretendedBackend, url: str):
        self.service, self.backend, self.url = service, backend, url
        self.loop = asyncio.get_running_loop()

    def call[Found](self, function: Callable[..., Found], *arguments: Any) -> Found:
        async def run() -> Found:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def post(self, path: str, body: Any, key: str = KEY, **headers: str) -> httpx.Response:
        given = {"X-API-Key": key, **headers}
        url = f"{self.url}/api/v1/{path}"
        if isinstance(body, bytes):
            return httpx.post(url, content=body, headers=given, timeout=60)
        return httpx.post(url, json=body, headers=given, timeout=60)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}/api/v1/{path}", headers={"X-API-Key": KEY, **headers})


def until(holds: Callable[[], bool]) -> None:
    """Waits for what happens in the background."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def serving(
    root: Path,
    backend: PretendedBackend | None = None,
    around: Callable[[Any], Any] = lambda app: app,
    **kept: Any,
) -> Iterator[Served]:
    """`around`: what stands between the client and the app; `kept`: attributes of the service's
    requests."""
    ready: list[Served] = []
    there, over = threading.Event(), threading.Event()

    async def run() -> None:
        made = PretendedBackend() if backend is None else backend
        service = Service(made, Folders(root), KEY)
        vars(service.requests).update(kept)
        at = Listening("127.0.0.1", 0)
        tasks = [
            asyncio.create_task(at.serve(around(service.app()))),
            asyncio.create_task(service.watch()),
        ]
        await at.started()
        ready.append(Served(service, made, at.root))
        there.set()
        await asyncio.to_thread(over.wait)
        at.stop()
        await tasks[0]
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        at.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert there.wait(30)
        yield ready[0]
    finally:
        over.set()
        thread.join(30)


@contextmanager
def client(served: Served, key: str = KEY, **named: Any) -> Iterator[tinker.ServiceClient]:
    """That speaks to nobody else, and is closed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        for name in ("API_KEY", "BASE_URL", "PROJECT_ID", "CREDENTIAL_CMD", "TAGS"):
            patch.delenv(f"TINKER_{name}", raising=False)
        made = tinker.ServiceClient(base_url=served.url, api_key=key, **named)
        try:
            yield made
        finally:
            made.close("success").result(30)


def datum(tokens: list[int], targets: list[int] | None = None, **inputs: Any) -> tinker.Datum:
    """Of a text whose next tokens are its targets, unless others are given."""
    targets = [*tokens[1:], 0] if targets is None else targets
    prompt = tinker.ModelInput.from_ints(tokens)
    return tinker.Datum(prompt, {"target_tokens": targets, **inputs})
