"""Bodies of requests, up to a length, from clients that may go meanwhile."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from lora_moe_rl.endpoint.admission import Place
from lora_moe_rl.endpoint.refusal import Refused

LONGEST_BODY = 32 * 2**20
CLIENT_GONE = 499  # nginx' number; nobody reads it


class ClientGone(Exception):
    """Raised when a client has not waited for its answer."""


async def body_of(
    request: Request, place: Place | None = None, longest: int = LONGEST_BODY
) -> bytes:
    """Raises Refused for a body that is too long, by what its client says of it or by what comes,
    or for which `place` has no room, before it is all here; and ClientGone."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > longest:
        raise _too_long(longest)
    parts, length = [], 0
    try:
        async for part in request.stream():
            length += len(part)
            if length > longest:
                raise _too_long(longest)
            if place is not None:
                place.hold(len(part))
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(parts)


def _too_long(longest: int) -> Refused:
    return Refused(413, "too_large", f"a body has at most {longest} bytes")
