"""An endpoint that listens, in the event loop of whoever runs it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from lora_moe_rl.errors import ConfigError

BACKLOG = 4096
END_S = 5  # in which answers may still be sent
KEEP_ALIVE_S = 120  # longer than clients keep a connection: who closes first loses no request


class Listening:
    """A socket that is bound, and serves once `serve` runs; a port 0 is any free one. Raises
    ConfigError when it cannot be bound. `key`: what must be set for another address than
    loopback's, if it is not; it would let anybody in who reaches it."""

    def __init__(self, host: str, port: int, key: str | None = None):
        if key is not None and not _is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines, and no key is asked for: set {key}, "
                "or listen on 127.0.0.1"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self.socket.close()
            raise ConfigError(
                f"the endpoint cannot listen on {host}:{port}: {error}; choose another port, or 0 "
                "for any that is free"
            ) from error
        bound = self.socket.getsockname()
        shown = f"[{host}]" if ":" in host else host
        self.root = f"http://{shown}:{bound[1]}"
        self._server: uvicorn.Server | None = None
        self._stopped = False

    @property
    def url(self) -> str:
        """What OPENAI_BASE_URL is."""
        return f"{self.root}/v1"

    async def serve(self, app: Any) -> None:
        """Until it is cancelled, or `stop` is called, which may have been before."""
        if self._stopped:
            return
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=END_S,
            ws="none",
        )
        self._server = _Server(config)
        await self._server.serve([self.socket])

    async def started(self) -> None:
        """Returns once it answers."""
        while self._server is None or not self._server.started:
            await asyncio.sleep(0.005)

    def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        self.socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
