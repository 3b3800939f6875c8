"""A rollout engine, without Ray, that samples while versions are published to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from lora_moe_rl.data.samples import Sample
from lora_moe_rl.ports import Turn
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.in_flight import InFlight, Piece
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import SentRoutes, send


class InFlightEngine(RolloutEngine):
    async def start(self) -> dict[str, Any]:
        """No token ends a sample: all are as long as they may be."""
        facts = await super().start()
        self.sampling = outputs.sampling_params(self.config, set())
        return facts

    def _packed(
        self, pieces: list[list[Piece]], turn: Turn | None
    ) -> tuple[list[Sample], SentRoutes]:
        """Routes as they are: there is no object store for them."""
        recorded = 0 if turn is None else turn.recorded
        shape = self.spec.shape
        samples, table = outputs.samples_and_routes(pieces, self.tokenizer, shape, recorded)
        return samples, send(table)

    async def sample_across(
        self,
        prompts: Sequence[Sequence[int]],
        seed: int,
        sent: Sequence[tuple[int, Sequence[SentPart]]],
        every_s: float,
        way: str,
    ) -> tuple[list[Sample], RouteTable, float]:
        """A sample of each prompt, their routes, and the seconds that they took. They begin at the
        first of `sent` (version, parts), and another is published every `every_s` seconds. `way`:
        finish, or join or split for requests that go on under each."""
        (version, parts), *later = sent
        await self.publish(version, *parts)
        self.in_flight = InFlight(way == "split")
        started = time.perf_counter()
        asked = [
            asyncio.create_task(self.sample(prompt, 1, version, seed + number))
            for number, prompt in enumerate(prompts)
        ]
        for newer, parts in later:
            await asyncio.sleep(every_s)
            await self.publish(newer, *parts)
            if way != "finish":
                await self.move_on(newer)
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - started
        samples = [sample for samples, _ in answers for sample in samples]
        return samples, RouteTable.concat([routes.table() for _, routes in answers]), seconds
