"""What is asked of a model, each in its turn: passes, steps, checkpoints."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from lora_moe_rl.endpoint.answering import Json
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service import wire
from lora_moe_rl.service.backend import Lora
from lora_moe_rl.service.bodies import (
    Body,
    ExternalBody,
    LoadBody,
    ModelBody,
    ModelId,
    Numbered,
    SaveBody,
    StepBody,
    read,
)
from lora_moe_rl.service.folders import Run, Saved
from lora_moe_rl.service.handling import Handler
from lora_moe_rl.service.line import LEARNS
from lora_moe_rl.service.place import EXTERNAL, WEIGHTS, Place, place_of
from lora_moe_rl.service.requests import Reply, Work, in_json, in_protobuf
from lora_moe_rl.service.sessions import Model, Session

if TYPE_CHECKING:
    from lora_moe_rl.service.app import Service

LONGEST_PASS = 256 * 2**20
PROTOBUF = "application/x-protobuf"
EXTERNALLY = "save_weights_external"


def check_base(service: Service, name: str, what: str) -> None:
    """Raises ServiceError for another base than the one that is served."""
    served = service.backend.facts.base_model
    if name != served:
        raise ServiceError(f"{what} {name!r} is not served here; {served!r} is")


async def _create(service: Service, request: Request) -> Response:
    body = read(ModelBody, await service.json_of(request))
    session = service.sessions.find(body.session_id)

    def prepared(model: Model) -> Callable[[], Awaitable[Lora]]:
        check_base(service, body.base_model, "base_model")
        lora = body.lora_config.lora(secrets.randbits(31))
        if lora.rank > (most := service.backend.facts.rank):
            raise ServiceError(f"rank={lora.rank} is not served here: up to rank={most} is")
        service.backend.check(lora)

        async def make() -> Lora:
            await service.backend.create(model.id, lora)
            return lora

        return make

    return _made(service, session, body.model_seq_id, "create_model", prepared, body.user_metadata)


async def _load(service: Service, request: Request) -> Response:
    """Loads a checkpoint as a new model of a session, or in the place of one."""
    content = await service.json_of(request)
    if isinstance(content, dict) and content.get("model_id") is not None:
        return _in_turn(service, LoadBody, "load_weights", _reload, content)
    body = read(LoadBody, content)
    assert body.session_id is not None and body.model_seq_id is not None

    def prepared(model: Model) -> Callable[[], Awaitable[Lora]]:
        place = _to_load(service, body)

        async def make() -> Lora:
            with service.folders.reading(place) as directory:
                return await service.backend.load(model.id, directory, body.optimizer)

        return make

    session = service.sessions.find(body.session_id)
    return _made(service, session, body.model_seq_id, "load_weights", prepared, body.user_metadata)


def _made(
    service: Service,
    session: Session,
    number: int,
    kind: str,
    prepared: Callable[[Model], Callable[[], Awaitable[Lora]]],
    user_metadata: dict[str, str] | None,
) -> Response:
    """The future of a new model: it is the first that is asked of it. Raises ServiceError for what
    cannot be made, as `prepared` finds."""
    id = f"{session.id}:train:{number}"
    first = f"{id}:request:0"
    if service.requests.earlier(first, kind) is not None:
        return Json({"request_id": first, "model_id": id})
    if id in session.models:
        raise ServiceError(f"model {id} is there already")
    model = service.sessions.add_model(session, number)

    async def work() -> Reply:
        try:
            model.lora = await make()
            about = service.backend.facts.base_model, model.lora, service.folders.clock()
            service.folders.add(Run(id, *about, user_metadata or {}))
        except BaseException as error:
            session.models.pop(id, None)
            model.line.end(f"it could not be made: {error}")
            if model.lora is not None:
                service.sessions.later(service.backend.forget(id))
            raise
        return in_json({"type": kind, "model_id": id})

    try:
        make = prepared(model)
        return _future(model, model.line.submit(0, kind, work))
    except BaseException:
        del session.models[id]
        model.line.end("it could not be made")
        raise


def _future(model: Model, id: str) -> Response:
    return Json({"request_id": id, "model_id": model.id})


async def _forward_backward(service: Service, request: Request) -> Response:
    content = await service.content_of(request, PROTOBUF, LONGEST_PASS)
    call = await asyncio.to_thread(wire.read_pass, content)
    if call.seq < 1:
        raise ServiceError(f"seq_id={call.seq}: requests of a model are numbered from 1")
    model = service.sessions.model(call.model)
    try:
        max_length = service.backend.facts.max_length
        data = await asyncio.to_thread(wire.data_of, call, max_length)
        loss = wire.loss_of(call)
    except ServiceError as error:
        work: Work = _failing(error)
    else:
        # The message, which holds all of it once more, is not kept until then.
        backward = call.backward

        async def forward() -> Reply:
            service.folders.touch(model.id)
            found = await service.backend.forward(model.id, data, loss, backward)
            return in_protobuf(wire.passed(found))

        work = forward

    kind = LEARNS if call.backward else "forward"
    return _future(model, model.line.submit(call.seq, kind, work, len(content)))


def _failing(error: ServiceError) -> Work:
    async def work() -> Reply:
        raise error

    return work


def in_turn[B: Body](
    kind: type[B], name: str, work: Callable[[Service, Model, B], Awaitable[dict[str, Any]]]
) -> Handler:
    """A route: `work` returns what the future tells."""

    async def handle(service: Service, request: Request) -> Response:
        return _in_turn(service, kind, name, work, await service.json_of(request))

    return handle


def _in_turn[B: Body](
    service: Service,
    kind: type[B],
    name: str,
    work: Callable[[Service, Model, B], Awaitable[dict[str, Any]]],
    content: Any,
) -> Response:
    numbered = read(Numbered, content)
    model = service.sessions.model(numbered.model_id)
    try:
        body = read(kind, content)
    except ServiceError as error:
        run: Work = _failing(error)
    else:

        async def done() -> Reply:
            service.folders.touch(model.id)
            return in_json({"type": name, **await work(service, model, body)})

        run = done

    return _future(model, model.line.submit(numbered.seq_id, name, run))


async def _step(service: Service, model: Model, body: StepBody) -> dict[str, Any]:
    lost, model.line.lost = model.line.lost, None
    if lost is not None:
        await service.backend.forget_gradient(model.id)
        raise ServiceError(
            f"request {lost} of model {model.id} has failed, so the gradient is not whole: no step "
            "was made, and its other parts are forgotten; ask for forward_backward again"
        )
    return {"metrics": await service.backend.step(model.id, body.adam_params.adam)}


async def _save(service: Service, model: Model, body: SaveBody) -> dict[str, Any]:
    place = Place(model.id, WEIGHTS, body.path)
    service.folders.check_free(place, body.overwrite)

    async def fill(directory: Path) -> None:
        await service.backend.save(model.id, directory)

    return await write(service, model, place, fill, body.ttl_seconds, body.user_metadata)


async def _save_external(service: Service, model: Model, body: ExternalBody) -> dict[str, Any]:
    place = Place(model.id, EXTERNAL, body.path)
    service.folders.check_free(place, overwrite=False)

    async def fill(directory: Path) -> None:
        await service.backend.export(model.id, directory)

    return await write(service, model, place, fill, body.ttl_seconds, None)


async def write(
    service: Service,
    model: Model,
    place: Place,
    fill: Callable[[Path], Awaitable[None]],
    ttl_seconds: int | None,
    user_metadata: dict[str, str] | None,
) -> dict[str, Any]:
    """A checkpoint; its path, and its size in bytes."""
    assert model.lora is not None
    now = service.folders.clock()
    expires = None if ttl_seconds is None else now + ttl_seconds
    base = service.backend.facts.base_model
    saved = Saved(place, base, model.lora, now, expires, user_metadata=user_metadata or {})
    saved = await service.folders.write(saved, fill)
    return {"path": place.path, "size_bytes": saved.size_bytes}


async def _reload(service: Service, model: Model, body: LoadBody) -> dict[str, Any]:
    with service.folders.reading(_to_load(service, body)) as directory:
        model.lora = await service.backend.load(model.id, directory, body.optimizer)
    model.line.lost = None  # a model that is loaded has no gradient
    service.folders.add(replace(service.folders.run(model.id), lora=model.lora))
    return {"path": body.path, "model_id": model.id}


def _to_load(service: Service, body: LoadBody) -> Place:
    """Raises ServiceError for a checkpoint that is not there, or is of another base or kind."""
    place = place_of(body.path)
    saved = service.folders.find(place)
    if place.kind == EXTERNAL or (body.optimizer and place.kind != WEIGHTS):
        way = "of save_state" if body.optimizer else "of save_state or save_weights_for_sampler"
        raise ServiceError(f"{body.path} cannot be loaded so: take a checkpoint {way}")
    check_base(service, saved.base_model, f"{body.path} is of base model")
    if body.base_model is not None:
        check_base(service, body.base_model, "base_model")
    return place


async def _info(service: Service, request: Request) -> Response:
    model = service.sessions.model(read(ModelId, await service.json_of(request)).model_id)
    if model.lora is None:
        raise ServiceError(f"model {model.id} is not made yet")
    facts = service.backend.facts
    told = {
        "type": "get_info",
        "model_id": model.id,
        "model_data": {"model_name": facts.base_model, "tokenizer_id": facts.tokenizer},
        "model_name": facts.base_model,
        "is_lora": True,
        "lora_rank": model.lora.rank,
    }
    return Json(told)


ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "create_model", _create),
    ("POST", "load_weights", _load),
    ("POST", "get_info", _info),
    ("POST", "forward_backward", _forward_backward),
    ("POST", "optim_step", in_turn(StepBody, "optim_step", _step)),
    ("POST", "save_weights", in_turn(SaveBody, "save_weights", _save)),
    ("POST", EXTERNALLY, in_turn(ExternalBody, EXTERNALLY, _save_external)),
]
