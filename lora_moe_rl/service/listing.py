"""What lies in the folders: training runs and checkpoints, and samplers that are served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from lora_moe_rl.endpoint.answering import Json
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.bodies import PathBody, TtlBody, read
from lora_moe_rl.service.downloads import CHECKPOINT, asked_place
from lora_moe_rl.service.folders import Folders, Run, Saved
from lora_moe_rl.service.handling import Handler
from lora_moe_rl.service.place import EXTERNAL, SAMPLER, WEIGHTS, place_of

if TYPE_CHECKING:
    from lora_moe_rl.service.app import Service

OWNER = "lora-moe-rl"  # one key, one owner
TYPES = {WEIGHTS: "training", SAMPLER: "sampler", EXTERNAL: "external"}
LONGEST_PAGE = 1000


def page_of[Item](request: Request, items: Sequence[Item]) -> tuple[list[Item], dict[str, int]]:
    """Those of limit and offset in the URL, and where they stand. Raises ServiceError for numbers
    that are none."""
    query = request.query_params
    if query.get("project_id"):
        raise ServiceError("there are no projects here: leave project_id out")
    try:
        limit, offset = (
            int(query.get(name, or_else)) for name, or_else in (("limit", 100), ("offset", 0))
        )
    except ValueError as error:
        raise ServiceError(f"limit and offset are numbers: {error}") from error
    if not (1 <= limit <= LONGEST_PAGE and offset >= 0):
        raise ServiceError(f"limit={limit} offset={offset}: 1 to {LONGEST_PAGE}, and from 0")
    cursor = {"limit": limit, "offset": offset, "total_count": len(items)}
    return list(items[offset : offset + limit]), cursor


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(saved: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": saved.place.id,
        "checkpoint_type": TYPES[saved.place.kind],
        "time": _time(saved.created),
        "tinker_path": saved.place.path,
        "size_bytes": saved.size_bytes,
        "public": False,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }


def _training_run(folders: Folders, run: Run) -> dict[str, Any]:
    newest: dict[str, dict[str, Any]] = {}
    for saved in reversed(folders.of(run.model)):
        newest[saved.place.kind] = _checkpoint(saved)
    return {
        "training_run_id": run.model,
        "base_model": run.base_model,
        "model_owner": OWNER,
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "last_request_time": _time(folders.last_asked(run.model)),
        "last_checkpoint": newest.get(WEIGHTS),
        "last_sampler_checkpoint": newest.get(SAMPLER),
        "user_metadata": run.user_metadata,
    }


async def _runs(service: Service, request: Request) -> Response:
    page, cursor = page_of(request, await asyncio.to_thread(service.folders.runs))
    told = [await asyncio.to_thread(_training_run, service.folders, run) for run in page]
    return Json({"training_runs": told, "cursor": cursor})


async def _run(service: Service, request: Request) -> Response:
    run = service.folders.run(request.path_params["model"])
    return Json(_training_run(service.folders, run))


async def _of_run(service: Service, request: Request) -> Response:
    run = service.folders.run(request.path_params["model"])
    return Json({"checkpoints": list(map(_checkpoint, service.folders.of(run.model)))})


async def _checkpoints(service: Service, request: Request) -> Response:
    page, cursor = page_of(request, await asyncio.to_thread(service.folders.all))
    return Json({"checkpoints": list(map(_checkpoint, page)), "cursor": cursor})


async def _delete(service: Service, request: Request) -> Response:
    place = asked_place(request)
    service.folders.find(place)
    await asyncio.to_thread(service.folders.delete, place)
    return Json({})


async def _ttl(service: Service, request: Request) -> Response:
    body = read(TtlBody, await service.json_of(request))
    service.folders.keep_for(asked_place(request), body.ttl_seconds)
    return Json({})


async def _weights_info(service: Service, request: Request) -> Response:
    body = read(PathBody, await service.json_of(request))
    saved = service.folders.find(place_of(body.tinker_path))
    told = {
        "base_model": saved.base_model,
        "is_lora": True,
        "lora_rank": saved.lora.rank,
        "train_unembed": False,
        "train_mlp": saved.lora.mlp,
        "train_attn": saved.lora.attention,
    }
    return Json(told)


async def _sampler(service: Service, request: Request) -> Response:
    sampler = service.sessions.sampler(request.path_params["sampler"])
    told = {
        "sampler_id": sampler.id,
        "base_model": service.backend.facts.base_model,
        "model_path": sampler.path,
    }
    return Json(told)


def _refusing(message: str) -> Handler:
    async def handle(service: Service, request: Request) -> Response:
        raise ServiceError(message)

    return handle


_PRIVATE = _refusing("one key opens all that is here: there is nobody to publish to")
_IN_FILES = _refusing(
    "checkpoints are not sent as archives: save_weights_external writes files of PEFT, and "
    "get_external_weights_urls tells where to get them"
)

ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "training_runs", _runs),
    ("GET", "training_runs/{model}", _run),
    ("GET", "training_runs/{model}/checkpoints", _of_run),
    ("GET", "checkpoints", _checkpoints),
    ("DELETE", CHECKPOINT, _delete),
    ("PUT", f"{CHECKPOINT}/ttl", _ttl),
    ("POST", f"{CHECKPOINT}/publish", _PRIVATE),
    ("DELETE", f"{CHECKPOINT}/publish", _PRIVATE),
    ("GET", f"{CHECKPOINT}/archive", _IN_FILES),
    ("POST", "weights_info", _weights_info),
    ("GET", "samplers/{sampler}", _sampler),
    ("POST", "copy_weights", _refusing("there are no projects here to copy weights between")),
    ("PUT", "sessions/{session}/project", _refusing("there are no projects here")),
    ("POST", "create_custom_loss", _refusing("losses of your own run beside you, not here")),
]
