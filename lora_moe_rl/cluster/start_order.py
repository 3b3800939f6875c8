"""In which order engines start that share GPUs by fractions (rollout.gpus_per_engine=0.5).

vLLM measures what a GPU has free when it begins and when it has loaded its model, and takes the
difference, whoever it is that allocated meanwhile, for its own: two that start together on one GPU
would each count the other's weights, and hold too small a cache, or none.

    GPU 0    engine 0 ──>        engine 1 ──>
    GPU 1    engine 2 ──>        engine 3 ──>        two waves
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import ray

from lora_moe_rl.cluster.actors import Actor, get
from lora_moe_rl.cluster.spread_actor import SpreadActor


class Starting:
    """Engines that are being started, from now on. `share`: whether several may stand on one GPU.
    `calls`: those that start them; None of one whose turn has not come."""

    def __init__(self, actors: Sequence[Actor], share: bool, timeout_s: float):
        self.actors, self.timeout_s = actors, timeout_s
        self.calls: list[Any | None] = [None] * len(actors)
        self._found: list[dict] | None = None
        self._waves = waves(_gpus_of(actors)) if share else [list(range(len(actors)))]
        self._begin(self._waves[0])

    def wait(self) -> list[dict]:
        """What each returns. Raises what `actors.get` does; each wave may take `timeout_s`."""
        if self._found is None:
            for wave in self._waves:
                self._begin(wave)
                get([self.actors[i] for i in wave], [self.calls[i] for i in wave], self.timeout_s)
            self._found = get(self.actors, self.calls, self.timeout_s)
            self.actors = ()  # one that is replaced later stays open nowhere
        return self._found

    def _begin(self, wave: list[int]) -> None:
        for index in wave:
            if self.calls[index] is None:
                self.calls[index] = self.actors[index].start()


def waves(gpus: Sequence[Collection[Hashable]]) -> list[list[int]]:
    """Which start together, by number, wave for wave: none that shares a GPU with another. `gpus`:
    those of each."""
    found: list[list[int]] = []
    for index, mine in enumerate(gpus):
        for wave in found:
            if not any(set(mine) & set(gpus[other]) for other in wave):
                wave.append(index)
                break
        else:
            found.append([index])
    return found


def _gpus_of(actors: Sequence[Actor]) -> list[set[tuple[str, str]]]:
    """The GPUs of engines, each by its node and number, once their actors are there."""
    asked = [[one.handle.__ray_call__.remote(_gpus) for one in _all_of(actor)] for actor in actors]
    return [{gpu for found in ray.get(refs) for gpu in found} for refs in asked]


def _all_of(actor: Actor) -> list[Actor]:
    return [actor, *actor.ranks] if isinstance(actor, SpreadActor) else [actor]


def _gpus(actor: Any) -> list[tuple[str, str]]:
    """Called in the actor."""
    node = ray.get_runtime_context().get_node_id()
    return [(node, str(number)) for number in ray.get_gpu_ids()]
