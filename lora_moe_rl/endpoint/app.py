"""The endpoint: OpenAI's protocol in front of sessions.

    /v1/models  /v1/chat/completions  /v1/completions      what any client of OpenAI's API speaks
    /inference/v1/generate                                 token ids in, token ids out
    /sessions/NAME/v1/…                                    the same, of the session in the URL
    /v1/session  /v1/sessions  /v1/reward  …               what others add (`more`)

A request is of the session of its key, or of the one in its URL. It is let in (admission), has its
turn in its session, and is given up when its client has gone: what it would have said is then in no
sample.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lora_moe_rl.endpoint import replies
from lora_moe_rl.endpoint.admission import Admission
from lora_moe_rl.endpoint.answering import Json
from lora_moe_rl.endpoint.bodies import ChatBody, TextBody, TokenBody, read
from lora_moe_rl.endpoint.receiving import CLIENT_GONE, ClientGone, body_of
from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.endpoint.rendering import Chats
from lora_moe_rl.endpoint.sessions import Answer, Session, Sessions
from lora_moe_rl.errors import LoraMoeRlError

log = logging.getLogger(__name__)


@dataclass
class Endpoint:
    """`more`: further routes, each called with the endpoint and the request."""

    sessions: Sessions
    chats: Chats
    admission: Admission
    more: Sequence[tuple[str, str, Callable[[Endpoint, Request], Awaitable[Response]]]] = ()
    gone: int = field(default=0, init=False)  # requests whose client did not wait

    def app(self) -> Starlette:
        ways = [
            ("GET", "/health", _health),
            ("GET", "/v1/models", _models),
            ("POST", "/v1/chat/completions", _chat),
            ("POST", "/v1/completions", _text),
            ("POST", "/inference/v1/generate", _tokens),
            *self.more,
        ]
        routes = [
            Route(prefix + path, self._handled(handler), methods=[method])
            for method, path, handler in ways
            for prefix in ("", "/sessions/{session}")
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    def session_of(self, request: Request) -> Session:
        """Raises Refused."""
        return self.sessions.find(key_of(request), request.path_params.get("session"))

    async def answered[Body: BaseModel](
        self,
        request: Request,
        session: Session,
        kind: type[Body],
        work: Callable[[Body], Coroutine[Any, Any, Answer]],
    ) -> tuple[Body, Answer]:
        """What is asked, and the turn that answers it, unless its client goes before that is there;
        who goes while it waits leaves its place to others."""
        with self.admission.place() as place:
            body = read(kind, await body_of(request, place))
            try:
                return body, await unless_gone(request, self._in_turn(work, body))
            except LoraMoeRlError as error:
                session.source.failed(error)
                message = f"the policy cannot be asked: {error}"
                raise Refused(503, "engine_failed", message, 1) from error

    async def _in_turn[Body: BaseModel](
        self, work: Callable[[Body], Coroutine[Any, Any, Answer]], body: Body
    ) -> Answer:
        async with self.admission.turns:
            return await work(body)

    def _handled(
        self, handler: Callable[[Endpoint, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                return await handler(self, request)
            except Refused as error:
                again = error.retry_after_s
                headers = {} if again is None else {"Retry-After": str(again)}
                return Json(error.body(), error.status, headers)
            except ClientGone:
                self.gone += 1
                return Response(status_code=CLIENT_GONE)
            except asyncio.CancelledError:  # by the server, which has waited for the answer
                ends = Refused(503, "server_ends", "this server has been ended meanwhile")
                return Json(ends.body(), ends.status)
            except Exception:
                log.exception("a request to %s failed", request.url.path)
                fault = Refused(500, "internal_error", "this server has failed; see its log")
                return Json(fault.body(), fault.status)

        return handle


async def unless_gone[Found](request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """What `work` returns; it is cancelled, and ClientGone raised, when the client goes."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled():
            raise Refused(410, "session_ended", "this session has ended meanwhile")
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def key_of(request: Request) -> str:
    """The key that a client sends; '' without one. Raises Refused for one in another scheme."""
    header = request.headers.get("authorization", "")
    scheme, _, key = header.partition(" ")
    if header and (scheme.lower() != "bearer" or not key.isascii()):
        raise Refused(401, "invalid_api_key", "send the key as Authorization: Bearer KEY")
    return key.strip()


async def _health(endpoint: Endpoint, request: Request) -> Response:
    return Json({"status": "ok"})


async def _models(endpoint: Endpoint, request: Request) -> Response:
    source = endpoint.session_of(request).source
    models = [
        {"id": name, "object": "model", "created": 0, "owned_by": "lora-moe-rl",
         "max_model_len": source.max_length}
        for name in source.models()
    ]  # fmt: skip
    return Json({"object": "list", "data": models})


async def _chat(endpoint: Endpoint, request: Request) -> Response:
    session = endpoint.session_of(request)
    body, answer = await endpoint.answered(
        request, session, ChatBody, lambda body: session.chat(body, endpoint.chats)
    )
    logprobs = bool(body.logprobs)
    if body.stream:
        return _stream(replies.chat_events(answer, logprobs, body.include_usage))
    return Json(replies.chat(answer, logprobs))


async def _text(endpoint: Endpoint, request: Request) -> Response:
    session = endpoint.session_of(request)
    body, answer = await endpoint.answered(
        request, session, TextBody, lambda body: session.text(body, endpoint.chats)
    )
    logprobs = body.logprobs is not None
    if body.stream:
        return _stream(replies.text_events(answer, logprobs, body.include_usage))
    return Json(replies.text(answer, logprobs))


async def _tokens(endpoint: Endpoint, request: Request) -> Response:
    session = endpoint.session_of(request)
    _, answer = await endpoint.answered(
        request, session, TokenBody, lambda body: session.tokens(body, endpoint.chats)
    )
    return Json(replies.tokens(answer))


def _stream(events: Iterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


async def _http_error(request: Request, error: Exception) -> Response:
    """What no route takes, in the form that clients read."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    refused = Refused(error.status_code, "not_found", f"there is no {where} here")
    return Json(refused.body(), error.status_code)
