"""The service: Tinker's protocol in front of a backend.

    create_session, heartbeat, finish, client/config    sessions (here)
    create_model, forward_backward, optim_step, save…   of a model, in its turn (models)
    create_sampling_session, asample                    of a sampler (samplers)
    retrieve_future, cancel_future                      the replies (here)
    training_runs, checkpoints, weights_info            what lies in the folders (listing)
    external_weights_urls                               files of it (downloads)

A request that is wrong before it has a turn is refused with a status that the SDK raises at once;
one that has a turn fails in its future, so that its number is not missing to those after it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_moe_rl.endpoint.answering import Json
from lora_moe_rl.endpoint.receiving import CLIENT_GONE, LONGEST_BODY, ClientGone, body_of
from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.errors import LoraMoeRlError, ServiceError
from lora_moe_rl.service import downloads, listing, models, samplers
from lora_moe_rl.service.backend import Backend
from lora_moe_rl.service.bodies import FetchBody, FinishBody, SdkBody, SessionBody, SessionId, read
from lora_moe_rl.service.folders import Folders
from lora_moe_rl.service.handling import Handler
from lora_moe_rl.service.requests import Requests
from lora_moe_rl.service.sessions import Sessions
from lora_moe_rl.service.settings import check_key

SWEEP_S = 30.0
JSON = "application/json"
NO_UNEMBED = (
    "this service trains no adapter on the unembedding: train_unembed has no effect; "
    "train_attn and train_mlp have"
)
CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}

log = logging.getLogger(__name__)


class Service:
    """`folders`: where checkpoints are. `key`: what clients must send; None: none is asked for.
    Raises ConfigError for a key that no client would send. `watch` is to run beside the app."""

    def __init__(self, backend: Backend, folders: Folders, key: str | None = None):
        check_key(key)
        self.backend, self.key, self.secret = backend, key, secrets.token_bytes(32)
        self.folders = folders
        self.requests = Requests()
        self.sessions = Sessions(backend, self.requests)

    def app(self) -> Starlette:
        ways = [*ROUTES, *models.ROUTES, *samplers.ROUTES, *listing.ROUTES]
        ways += downloads.ROUTES
        routes = [
            Route(f"/api/v1/{path}", self._handled(handler), methods=[method])
            for method, path, handler in ways
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    async def watch(self) -> None:
        """Until it is cancelled: ends silent sessions, and deletes what has expired."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sessions.sweep()
            self.requests.sweep()
            try:
                await asyncio.to_thread(self.folders.sweep)
            except Exception:  # a disk that is away for a while
                log.exception("what has expired could not be looked for")

    async def content_of(self, request: Request, media_type: str, longest: int) -> bytes:
        """A body. Raises Refused for one of another kind, which a page in a browser could send
        unasked, or that is too long."""
        given = request.headers.get("content-type", "").partition(";")[0].strip()
        if given != media_type:
            raise Refused(415, "media_type", f"send the body as {media_type}, not {given!r}")
        if encoding := request.headers.get("content-encoding"):
            raise Refused(415, "encoding", f"a body in {encoding} is not read; send it as it is")
        return await body_of(request, longest=longest)

    async def json_of(self, request: Request) -> Any:
        """Raises Refused, and ServiceError for what is not JSON."""
        content = await self.content_of(request, JSON, LONGEST_BODY)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"the body is not JSON: {error}") from error

    def _check_key(self, request: Request) -> None:
        if self.key is None:
            return
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key", bearer)
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise Refused(401, "invalid_api_key", "this is not the key of this service")

    def _handled(self, handler: Handler) -> Any:
        async def handle(request: Request) -> Response:
            try:
                if handler not in KEYLESS:
                    self._check_key(request)
                return await handler(self, request)
            except Refused as error:
                return _refusal(error.status, str(error))
            except ServiceError as error:
                return _refusal(400, str(error))
            except ClientGone:
                return Response(status_code=CLIENT_GONE)
            except asyncio.CancelledError:  # the server ends
                return Response(status_code=503)
            except LoraMoeRlError as error:
                log.error("%s failed: %s", request.url.path, error)
                return _refusal(500, str(error))
            except Exception:
                log.exception("a request to %s failed", request.url.path)
                return _refusal(500, "this server has failed; see its log")

        return handle


def _refusal(status: int, message: str) -> Response:
    category = "server" if status >= 500 else "user"
    # What has failed here fails again.
    headers = {"x-should-retry": "false"} if status >= 500 else {}
    return Json({"error": message, "category": category}, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What no route takes."""
    assert isinstance(error, HTTPException)
    told = f"there is no {request.method} {request.url.path} here"
    return _refusal(error.status_code, told)


async def _health(service: Service, request: Request) -> Response:
    return Json({"status": "ok"})


async def _config(service: Service, request: Request) -> Response:
    read(SdkBody, await service.json_of(request))
    return Json(CONFIG)


async def _dynamic_config(service: Service, request: Request) -> Response:
    read(SdkBody, await service.json_of(request))
    return Json(DYNAMIC_CONFIG)


async def _capabilities(service: Service, request: Request) -> Response:
    facts = service.backend.facts
    model = {
        "model_name": facts.base_model,
        "max_context_length": facts.max_length,
        "trainable": True,
        "sampleable": True,
    }
    return Json({"supported_models": [model]})


async def _telemetry(service: Service, request: Request) -> Response:
    """Nobody here reads it."""
    await service.content_of(request, JSON, LONGEST_BODY)
    return Json({"status": "accepted"})


async def _create_session(service: Service, request: Request) -> Response:
    session = service.sessions.create(read(SessionBody, await service.json_of(request)))
    told = {"type": "create_session", "session_id": session.id, "warning_message": NO_UNEMBED}
    return Json(told)


async def _heartbeat(service: Service, request: Request) -> Response:
    service.sessions.find(read(SessionId, await service.json_of(request)).session_id)
    return Json({"type": "session_heartbeat"})


async def _finish(service: Service, request: Request) -> Response:
    """Ends a session; of one that has ended already nothing is left to do."""
    asked = read(FinishBody, await service.json_of(request))
    id = request.path_params["session"]
    if id not in service.sessions.ended:
        why = f"its client said {asked.reason.type}" + (f": {asked.detail}" if asked.detail else "")
        service.sessions.end(service.sessions.find(id), why)
    return Json({})


async def _session(service: Service, request: Request) -> Response:
    session = service.sessions.find(request.path_params["session"])
    told = {
        "training_run_ids": list(session.models),
        "sampler_ids": list(session.samplers),
        "user_metadata": session.asked.user_metadata,
        "display_name": session.asked.display_name,
    }
    return Json(told)


async def _sessions(service: Service, request: Request) -> Response:
    page, _ = listing.page_of(request, list(service.sessions.alive)[::-1])
    return Json({"sessions": page})


async def _retrieve(service: Service, request: Request) -> Response:
    """Clients read of a 410 only that it is one, and ask anew. Where that helps nobody they are
    told why."""
    asked = read(FetchBody, await service.json_of(request))
    session, _, _ = asked.request_id.partition(":")
    if asked.request_id not in service.requests.known and session not in service.sessions.alive:
        raise Refused(404, "not_found", service.sessions.why_not(session))
    reply = await service.requests.fetch(asked.request_id, asked.allow_metadata_only)
    return Response(reply.content, reply.status, media_type=reply.media_type)


async def _cancel(service: Service, request: Request) -> Response:
    service.requests.cancel(read(FetchBody, await service.json_of(request)).request_id)
    return Json({})


ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "healthz", _health),
    ("POST", "client/config", _config),
    ("POST", "client/dynamic_config", _dynamic_config),
    ("GET", "get_server_capabilities", _capabilities),
    ("POST", "telemetry", _telemetry),
    ("POST", "create_session", _create_session),
    ("POST", "session_heartbeat", _heartbeat),
    ("POST", "sessions/{session}/finish", _finish),
    ("GET", "sessions/{session}", _session),
    ("GET", "sessions", _sessions),
    ("POST", "retrieve_future", _retrieve),
    ("POST", "cancel_future", _cancel),
]
KEYLESS = (_health, downloads.download)
