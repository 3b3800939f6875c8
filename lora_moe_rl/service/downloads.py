"""Files of external weights, by URLs that need no key and open for an hour.

A URL carries when it ends, and a signature over that and the file that it is of.
"""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from lora_moe_rl.endpoint.answering import Json
from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.handling import Handler
from lora_moe_rl.service.place import EXTERNAL, Place

if TYPE_CHECKING:
    from lora_moe_rl.service.app import Service

OPEN_S = 3600
CHECKPOINT = "training_runs/{model}/checkpoints/{kind}/{name}"


def asked_place(request: Request) -> Place:
    """The checkpoint of a URL. Raises ServiceError for parts that are no names."""
    parts = request.path_params
    return Place(parts["model"], parts["kind"], parts["name"])


async def _urls(service: Service, request: Request) -> Response:
    place = asked_place(request)
    if place.kind != EXTERNAL:
        told = f"{place.path} is not of external_weights: save_weights_external writes such ones"
        raise ServiceError(told)
    service.folders.find(place)
    until = int(service.folders.clock()) + OPEN_S
    urls = {
        file: f"{request.base_url}api/v1/downloads/{until}/{_signed(service, until, place, file)}/"
        f"{place.model}/{place.id}/{quote(file)}"
        for file in service.folders.files(place)
    }
    return Json({"urls": urls, "expires": datetime.fromtimestamp(until, UTC).isoformat()})


def _signed(service: Service, until: int, place: Place, file: str) -> str:
    told = f"{until}\n{place.path}\n{file}".encode()
    return hmac.new(service.secret, told, "sha256").hexdigest()


async def download(service: Service, request: Request) -> Response:
    """Gives an archive to whoever has the URL."""
    place, file, until = (
        asked_place(request),
        request.path_params["file"],
        request.path_params["until"],
    )
    wanted = _signed(service, until, place, file)
    if not hmac.compare_digest(request.path_params["signature"].encode(), wanted.encode()):
        raise Refused(403, "no_url", "this is no URL of this service, or of an earlier start of it")
    if until < service.folders.clock():
        raise Refused(403, "expired", "this URL has ended: ask for get_external_weights_urls again")
    service.folders.find(place)
    return FileResponse(service.folders.directory(place) / file)


ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", f"{CHECKPOINT}/external_weights_urls", _urls),
    ("GET", "downloads/{until:int}/{signature}/{model}/{kind}/{name}/{file:path}", download),
]
