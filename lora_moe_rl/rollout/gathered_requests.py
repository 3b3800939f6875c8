"""Mend for vLLM: requests that come together go to its core together.

vLLM's front sends each request, and each of the n samples of one, as a message of its own, which
wakes a thread of the core that then takes turns with the model's step. Here those of one turn of
the front's event loop are one call of the core (`EngineCoreProc` has a method more), which does
with each of them what it does with a message. They are sent before whatever is sent after them, so
that nothing overtakes them.

Not where an engine has several data-parallel ranks: there the front chooses a rank for each.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.serial_utils import MsgpackDecoder

from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/gathered_requests.py"
METHOD = "lora_moe_rl_add_requests"
NOTED = "lora_moe_rl_noted"  # of a front: encoded requests that have not been sent

stock_add, stock_send = AsyncMPClient.add_request_async, AsyncMPClient._send_input_message


async def _add(self: Any, request: EngineCoreRequest) -> None:
    """Notes the request; it is sent when the event loop comes round. Raises EngineDeadError."""
    self.ensure_alive()
    request.client_index = self.client_index
    encoded = self.encoder.encode(request)
    gathers = self.__class__ is AsyncMPClient and len(encoded) == 1  # no array travels beside it
    if not gathers:
        return await stock_add(self, request)
    noted = self.__dict__.setdefault(NOTED, [])
    noted.append(bytes(encoded[0]))
    if len(noted) == 1:
        asyncio.get_running_loop().call_soon(_send_noted, self)


def _send(self: Any, message: tuple[Any, ...], engine: bytes):
    _send_noted(self)
    return stock_send(self, message, engine)


def _send_noted(self: Any) -> None:
    noted = self.__dict__.get(NOTED)
    if not noted or self.resources.engine_dead:  # of which those that wait are told
        return
    self.__dict__[NOTED] = []
    number = uuid.uuid1().int >> 64  # as `AsyncMPClient._call_utility_async` has them
    added = self.utility_results[number] = asyncio.get_running_loop().create_future()
    call = self.encoder.encode((self.client_index, number, METHOD, (noted,)))
    stock_send(self, (EngineCoreRequestType.UTILITY.value, *call), self.core_engine)
    self._ensure_output_queue_task()
    added.add_done_callback(lambda added: _added(self, added))


def _added(self: Any, answer: asyncio.Future[None]) -> None:
    """Requests that the core has not taken would be waited for without end: all that wait are told,
    by what raises in the front what its socket's reader raises."""
    if not answer.cancelled() and (error := answer.exception()) is not None:
        self.outputs_queue.put_nowait(error)


def _add_in_core(self: EngineCoreProc, requests: list[bytes]) -> None:
    """What the core's thread for messages and then its loop do with each request."""
    decoder = MsgpackDecoder(EngineCoreRequest)
    for encoded in requests:
        request = decoder.decode(encoded)
        try:
            ready = self.preprocess_add_request(request)
        except Exception:
            self._handle_request_preproc_error(request)
            continue
        self._handle_client_request(EngineCoreRequestType.ADD, ready)


def install() -> None:
    """Makes fronts and cores of this process so."""
    require_version("vllm", WHO)
    require_parameters(stock_add, ("self", "request"), WHO)
    require_parameters(stock_send, ("self", "message", "engine"), WHO)
    core = "preprocess_add_request", "_handle_request_preproc_error", "_handle_client_request"
    require_attributes(EngineCoreProc, core, WHO)
    AsyncMPClient.add_request_async = _add
    AsyncMPClient._send_input_message = _send
    setattr(EngineCoreProc, METHOD, _add_in_core)
