"""Engines, a trainer and a channel behind the ports, with faults on demand and no models.

A token's logprob is a function of the token, of the adapter version and of the routes alone, the
same in trainer and engines; `noise` is what engines add to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import RefitError
from lora_moe_rl.ports import Receipt, Scored

OTHER = 1000  # a version that nobody sent


def logprobs(token_ids, version, route: float, step: float) -> np.ndarray:
    """`version` None is the base, and so is 0: B is zero. `step`: how far versions are apart."""
    tokens = np.array(token_ids[1:], dtype=np.float64)
    moved = sum(np.sin(tokens * (1 + v)) for v in range(version or 0)) if version != OTHER else 9.0
    return (-2 - np.cos(tokens) + step * moved + 0.01 * route * np.sin(7 * tokens)).astype("f4")


@dataclass
class FaultyEngines:
    """`serves`: what each engine serves for the version it is asked for; `of_ranks`: of how many
    data-parallel ranks that is the last alone. `routes`: of each engine.
    `holds_other`: the tensors of which they hold something else than was sent."""

    step: float = 0.1
    noise: float = 0.0
    routes: list[float] = field(default_factory=lambda: [0.0])
    serves: dict[int, object] = field(default_factory=dict)  # by engine; absent: as asked
    of_ranks: int = 1
    holds_other: list[str] = field(default_factory=list)
    complete: bool = True
    refuses: bool = False
    compared: list[tuple] = field(default_factory=list)
    rolled_back: list[tuple] = field(default_factory=list)
    arrived: dict = field(default_factory=dict)  # of merged weights
    scored: list = field(default_factory=list)
    moved: list[int] = field(default_factory=list)

    kept: list[tuple] = field(default_factory=list)
    came_back: list[int] = field(default_factory=list)  # while the trainer updated

    # Proves the engine that stands in for the last, which a version's next probe finds gone.
    stands_in: Callable[[], Awaitable[None]] | None = None

    back: dict[str, float] = field(default_factory=dict)  # metrics of memory that was given back
    turns: list[str] = field(default_factory=list)

    @property
    def present(self) -> list[int]:
        return list(range(len(self.routes)))

    async def all_back(self) -> None:
        self.turns.append("all back")
        if (proof := self.stands_in) is not None:
            self.stands_in = None
            await proof()

    async def come_back(self) -> dict[str, float]:
        self.turns.append("come back")
        return self.back

    def go_on(self) -> None:
        self.turns.append("go on")

    async def move_on(self, version) -> None:
        self.moved.append(version)

    async def score(self, sequences, version, engines=None) -> list[Scored]:
        self.scored.append((sequences, version))
        self.turns.append("score")
        if self.stands_in is not None and version is not None:
            return []
        found = []
        for index in range(len(self.routes)) if engines is None else engines:
            served = version
            if version is not None and index in self.serves:
                served = self.serves[index](version)
            draw = np.random.default_rng([index, served or 0])
            route = self.routes[index]
            last = self.of_ranks - 1
            at = [served if i % self.of_ranks == last else version for i in range(len(sequences))]
            scores = [
                logprobs(*asked, route, self.step) for asked in zip(sequences, at, strict=True)
            ]
            scores = [s + self.noise * draw.standard_normal(s.shape) for s in scores]
            found.append(Scored(index, scores, route, str(route), self.complete))
        return found

    async def publish(self, version, parts) -> list[Receipt]:
        if self.refuses:
            raise RefitError("engine 0, worker 0: no")
        return [Receipt(version, 10, 1, "checksum", {}, self.arrived, 1.5) for _ in self.routes]

    async def keep(self, version, parts) -> list[int]:
        self.kept.append((version, parts))
        self.turns.append("keep")
        return self.came_back

    async def differing(self, version, parts, engines=None) -> list[str]:
        self.compared.append((version, engines))
        return self.holds_other

    async def roll_back(self, version, parts) -> list[str]:
        self.rolled_back.append((version, parts))
        return self.holds_other


@dataclass
class PlainTrainer:
    """`version` is its own. `scored`: the routes it was given, None for its own, and adapters."""

    version: int = 0
    step: float = 0.1
    scored: list = field(default_factory=list)
    ahead: list = field(default_factory=list)  # what it was told to begin with

    async def score(self, sequences, routes, adapters=True):
        self.scored.append((routes, adapters))
        version = self.version if adapters else None
        return [logprobs(ids, version, routes or 0.0, self.step) for ids in sequences]

    async def score_ahead(self, sequences) -> None:
        self.ahead.append(sequences)

    async def send(self):
        return [f"parts of {self.version}"]

    async def sent(self, parts):
        return parts


@dataclass
class PlainChannel:
    """Moves nothing, and writes down what it is told."""

    told: list[tuple] = field(default_factory=list)

    async def published(self, parts) -> None:
        self.told.append(("published", await parts()))

    def keep(self, versions) -> None:
        self.told.append(("keep", list(versions)))


class Prompts:
    """Each of 20 tokens, of a few hundred."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state) -> None: ...

    def next(self, count: int) -> list[Prompt]:
        draw = np.random.default_rng(0)
        return [Prompt(i, "", draw.integers(0, 300, 20).tolist()) for i in range(count)]


def samples(seed: int, count: int = 8, length: int = 30) -> list[SimpleNamespace]:
    draw = np.random.default_rng(seed)
    drawn = [draw.integers(0, 300, length) for _ in range(count)]
    return [SimpleNamespace(token_ids=token_ids, num_tokens=length) for token_ids in drawn]
