"""What `lora-moe-rl serve` has beside OpenAI's protocol: sessions that a client opens, looks at and
ends.

    POST   /v1/sessions    of the owner: a new session, {"name", "api_key", "base_url"}
    GET    /v1/session     of a session: its samples, token by token
    DELETE /v1/session     of a session: it ends
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lora_moe_rl.data.samples import Sample
from lora_moe_rl.endpoint.answering import Json
from lora_moe_rl.endpoint.app import Endpoint, key_of
from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.endpoint.sessions import Session


async def _open(endpoint: Endpoint, request: Request) -> Response:
    sessions = endpoint.sessions
    sessions.check_owner(key_of(request))
    assert sessions.shared is not None
    session = sessions.add(Session(sessions.shared))
    url = f"{request.base_url}sessions/{session.name}/v1"
    return Json({"name": session.name, "api_key": session.key, "base_url": url}, 201)


async def _show(endpoint: Endpoint, request: Request) -> Response:
    session = _kept(endpoint, request)
    samples = [
        {"model": model, **_shown(sample)}
        for model, one in session.conversations.items()
        for sample in one.samples()[0]
    ]
    return Json({"name": session.name, "forks": session.forks, "samples": samples})


async def _end(endpoint: Endpoint, request: Request) -> Response:
    endpoint.sessions.end(_kept(endpoint, request), "its client has ended it")
    return Response(status_code=204)


def _kept(endpoint: Endpoint, request: Request) -> Session:
    session = endpoint.session_of(request)
    if not endpoint.sessions.is_open(session):
        raise Refused(
            404, "no_session", "this key is of no session: open one with POST /v1/sessions"
        )
    return session


def _shown(sample: Sample) -> dict[str, Any]:
    segments = [
        {
            "author": segment.author,
            "token_ids": segment.token_ids.tolist(),
            "mask": segment.mask.tolist(),
            "logprobs": segment.logprobs.tolist(),
            "versions": segment.versions.tolist(),
        }
        for segment in sample.segments
    ]
    return {"finish_reason": sample.finish_reason, "segments": segments}


ROUTES = (
    ("POST", "/v1/sessions", _open),
    ("GET", "/v1/session", _show),
    ("DELETE", "/v1/session", _end),
)
