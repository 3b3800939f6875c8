"""Samplers: states of models that engines serve, and what is asked of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from lora_moe_rl.endpoint.answering import Json
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service import wire
from lora_moe_rl.service.backend import Sampled
from lora_moe_rl.service.bodies import SamplerBody, read
from lora_moe_rl.service.handling import Handler
from lora_moe_rl.service.models import check_base, in_turn, write
from lora_moe_rl.service.place import EXTERNAL, SAMPLER, Place, place_of
from lora_moe_rl.service.requests import Reply, in_protobuf
from lora_moe_rl.service.requests import Request as Asked
from lora_moe_rl.service.sample_bodies import SampleBody, SamplingSessionBody
from lora_moe_rl.service.sessions import Model, Sampler

if TYPE_CHECKING:
    from lora_moe_rl.service.app import Service

READY_S = 30.0


async def _save(service: Service, model: Model, body: SamplerBody) -> dict[str, Any]:
    """Saves a model as a checkpoint, or as a sampler without a name."""
    if body.path is not None:
        place = Place(model.id, SAMPLER, body.path)
        service.folders.check_free(place, overwrite=False)

        async def fill(directory: Path) -> None:
            await service.backend.save(model.id, directory)

        return await write(service, model, place, fill, body.ttl_seconds, body.user_metadata)
    id = f"{model.session.id}:sample:{body.sampling_session_seq_id}"
    if id in model.session.samplers:
        raise ServiceError(f"sampler {id} is there already")
    try:
        await service.backend.publish(model.id, id)
    except Exception:
        service.sessions.later(service.backend.forget_sampler(id))
        raise
    service.sessions.add_sampler(model.session, Sampler(id, model=model.id))
    return {"sampling_session_id": id}


async def _create(service: Service, request: Request) -> Response:
    """One that was asked for before is not made again: the client may have lost the answer. It is
    answered also when the sampler is not ready yet: clients give up an answer after 60 seconds."""
    body = read(SamplingSessionBody, await service.json_of(request))
    session = service.sessions.find(body.session_id)
    id = f"{session.id}:sample:{body.sampling_session_seq_id}"
    sampler = session.samplers.get(id)
    if sampler is None:
        sampler = _made(service, id, body)
        service.sessions.add_sampler(session, sampler)
    if (sampler.path, sampler.model) != (body.model_path, None):
        raise ServiceError(f"sampler {id} is there already, of something else")
    try:
        async with asyncio.timeout(READY_S):
            await sampler.ready()
    except TimeoutError:
        pass  # what is asked of it waits
    except Exception:
        if session.samplers.get(id) is sampler:
            del session.samplers[id]
            service.sessions.later(service.backend.forget_sampler(id))
        raise
    return Json({"type": "create_sampling_session", "sampling_session_id": id})


def _made(service: Service, id: str, body: SamplingSessionBody) -> Sampler:
    if body.base_model is not None:
        check_base(service, body.base_model, "base_model")
    if body.model_path is None:
        return Sampler(id)
    place = place_of(body.model_path)
    saved = service.folders.find(place)
    if place.kind == EXTERNAL:
        told = f"{body.model_path} cannot be sampled from: take save_weights_for_sampler's"
        raise ServiceError(told)
    check_base(service, saved.base_model, f"{body.model_path} is of base model")
    publishing = asyncio.create_task(_published(service, place, id))
    return Sampler(id, path=body.model_path, publishing=publishing)


async def _published(service: Service, place: Place, id: str) -> None:
    with service.folders.reading(place) as directory:
        await service.backend.publish_saved(directory, place.model, id)


async def _sample(service: Service, request: Request) -> Response:
    body = read(SampleBody, await service.json_of(request))
    sampler = service.sessions.sampler(body.sampling_session_id)
    id = f"{sampler.id}:request:{body.seq_id}"
    if service.requests.earlier(id, "sample") is None:
        _start(service, sampler, body, id)
    told = {"request_id": id, "sample_sequence_ids": [f"{id}:{i}" for i in range(body.num_samples)]}
    return Json(told)


def _start(service: Service, sampler: Sampler, body: SampleBody, id: str) -> None:
    ask = body.ask(service.backend.facts)
    session, _, _ = sampler.id.partition(":sample:")
    asked = service.requests.add(Asked(id, "sample", session, 8 * len(ask.prompt)))
    sampler.asks += 1
    sampler.used = service.sessions.clock()

    async def work() -> Reply:
        await sampler.ready()
        found = await service.backend.sample(sampler.served, ask)
        if body.prompt_logprobs_last_n is not None:
            found = _last(found, body.prompt_logprobs_last_n)
        return in_protobuf(wire.sampled(found))

    def answered(_: object) -> None:
        sampler.asks -= 1

    asked.reply.add_done_callback(answered)
    service.requests.run(asked, work)


def _last(found: Sampled, num: int) -> Sampled:
    """What was sampled, with logprobs of the prompt's last `num` tokens alone."""
    logprobs, top = found.prompt_logprobs, found.top_prompt
    if logprobs is not None:
        logprobs = logprobs.copy()
        logprobs[:-num] = np.nan
    if top is not None:
        kept = top.logprobs.copy()
        kept[:-num] = np.nan
        top = type(top)(top.token_ids, kept)
    return Sampled(found.samples, logprobs, top, found.cached)


ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "save_weights_for_sampler", in_turn(SamplerBody, "save_weights_for_sampler", _save)),
    ("POST", "create_sampling_session", _create),
    ("POST", "asample", _sample),
]
