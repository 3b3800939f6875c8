"""What answers one route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from lora_moe_rl.service.app import Service

type Handler = Callable[[Service, Request], Awaitable[Response]]
