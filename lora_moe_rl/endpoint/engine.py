"""A rollout engine without a run: adapter versions from files, and the base, each a model."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.endpoint.bodies import BASE, POLICY, Asked
from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.ports import Answers, Ref, Turn
from lora_moe_rl.refit.plan import Box
from lora_moe_rl.refit.sender import Sender
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.router_replay import travel
from lora_moe_rl.run.publisher import plan_layouts


class ServingEngine(RolloutEngine):
    """Answers requests that each have their own way of sampling."""

    async def reply(
        self, token_ids: Sequence[int], version: int | None, turn: Turn, asked: Asked
    ) -> tuple[Sample, travel.SentRoutes]:
        """One turn under `version` (None: the base), and the rows of routes that are new. Raises
        NotServed when the version is not in a slot."""
        manner = asked.sampling.manner
        seed = secrets.randbits(32) if manner.seed is None else manner.seed
        salt = asked.cache_salt
        piece, _ = await self._said(token_ids, version, turn, seed, manner, cache_salt=salt)
        shape = self.spec.shape
        found = outputs.samples_and_routes([[piece]], self.tokenizer, shape, turn.recorded)
        (sample,), table = found
        return sample, travel.send(table)

    async def take(
        self, config: RunConfig, versions: Mapping[int, Mapping[str, np.ndarray]], dtype: Dtype
    ) -> None:
        """Serves whole adapters, each as a version; as if one trainer rank had sent them."""
        (layout,) = plan_layouts(config, self.spec, dtype)
        await self.prepare_refit([layout])
        held = {name: torch.zeros(shape) for name, shape in self.spec.tensor_shapes.items()}
        boxes = {
            name: [(Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor)]
            for name, tensor in held.items()
        }
        scales = {site.name: site.scale for site in self.spec}
        outgoing = SHARED_MEMORY.outgoing(layout, "127.0.0.1")
        sender = Sender(layout, boxes, scales, outgoing)
        for version, tensors in sorted(versions.items()):
            for name, tensor in held.items():
                tensor.copy_(torch.from_numpy(tensors[name]))
            await self.publish(version, sender.send(version))


class Served:
    """What an engine serves, to sessions: `policy` is the newest version, `policy@12` is version
    12, `base` the model without adapters. `on_death` is called when the engine has failed."""

    def __init__(self, engine: ServingEngine, config: RunConfig, on_death: Any):
        self.engine, self.on_death = engine, on_death
        self.max_length = self.max_response = config.model.max_length

    @property
    def versions(self) -> list[int]:
        return sorted(self.engine.receipts)

    def models(self) -> list[str]:
        newest = [POLICY] if self.versions else []
        return [*newest, *(f"{POLICY}@{version}" for version in self.versions), BASE]

    def failed(self, error: LoraMoeRlError) -> None:
        self.on_death(error)

    def policy(self, asked: Asked) -> tuple[str, Answers]:
        if asked.model not in self.models():
            raise Refused(
                404,
                "model_not_found",
                f"there is no model {asked.model} here; there are {', '.join(self.models())}",
            )
        if asked.model == BASE:
            return BASE, ServedPolicy(self.engine, None, asked)
        _, at, number = asked.model.partition("@")
        version = int(number) if at else self.versions[-1]
        return f"{POLICY}@{version}", ServedPolicy(self.engine, version, asked)


class ServedPolicy:
    """An engine as one request sees it. `version` None is the base."""

    def __init__(self, engine: ServingEngine, version: int | None, asked: Asked):
        self.engine, self.version, self.asked = engine, version, asked

    async def sample(
        self, token_ids: Sequence[int], n: int, turn: Turn | None = None
    ) -> tuple[list[Sample], Ref]:
        assert n == 1 and turn is not None
        sample, routes = await self.engine.reply(token_ids, self.version, turn, self.asked)
        return [sample], routes
