"""The rollout engines as the controller sees them: all replicas as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from lora_moe_rl.actors import Actor, get
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.placement import Placement
from lora_moe_rl.refit.parts import PartLayout
from lora_moe_rl.refit.receipt import Receipt
from lora_moe_rl.refit.transports.choose import Wire
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.run_dir import RunDir
from lora_moe_rl.types import Prompt, Sample

POLL_S = 0.1
REFIT_GRACE_S = 10  # an engine that gives up by itself says more than one that is given up


@dataclass
class Rollout:
    """`samples` of all prompts, in order; `table_refs`: references to their routes, one an engine,
    in the same order."""

    samples: list[Sample]
    table_refs: list[Any]


class RolloutGroup:
    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        placement: Placement,
    ):
        self.config = config
        engine = ray.remote(RolloutEngine)
        self.actors = []
        for index in range(config.rollout.engines):
            name = f"engine-{index}"
            log = str(run_dir.log_path(name))
            place = placement.engine(index)
            handle = engine.options(**place).remote(config, str(model_dir), spec, index, log)
            self.actors.append(Actor(handle, name, run_dir))

    def start_async(self) -> None:
        self._starting = [actor.remote("start") for actor in self.actors]

    def wait_started(self) -> list[dict]:
        return get(self.actors, self._starting, self.config.rollout.start_timeout_s)

    def generate(
        self, prompts: list[Prompt], version: int, seed: int, progress: Callable[[int], None]
    ) -> Rollout:
        """A group of samples of each prompt. `progress` is told how many samples are done."""
        n = self.config.algorithm.group_size
        shares = np.array_split(np.arange(len(prompts)), len(self.actors))
        calls = [
            actor.remote(
                "generate",
                [prompts[i].token_ids for i in share],
                [int(i) for i in share],
                n,
                version,
                seed,
                num_returns=2,
            )
            for actor, share in zip(self.actors, shares, strict=True)
            if len(share)
        ]
        used = self.actors[: len(calls)]
        sample_refs = [samples for samples, _ in calls]
        while len(ray.wait(sample_refs, num_returns=len(sample_refs), timeout=POLL_S)[1]):
            progress(sum(get(used, [actor.remote("completed") for actor in used])))
        parts = get(used, sample_refs)
        return Rollout([s for part in parts for s in part], [table for _, table in calls])

    def score(self, sequences: list[list[int]], version: int | None):
        """Logprobs from each engine, and a reference to the first one's routes."""
        calls = [actor.remote("score", sequences, version, num_returns=2) for actor in self.actors]
        return get(self.actors, [scores for scores, _ in calls]), [table for _, table in calls]

    def prepare_refit(self, layouts: list[PartLayout], wire: Wire) -> None:
        get(self.actors, [actor.remote("prepare_refit", layouts, wire) for actor in self.actors])

    def publish(self, version: int, sent_refs: list[Any]) -> list[Receipt]:
        """Every engine takes the version, or the run stops."""
        refs = [actor.remote("publish", version, *sent_refs) for actor in self.actors]
        # An engine may wait as long for a slot and again for its workers.
        return get(self.actors, refs, 2 * self.config.refit.timeout_s + REFIT_GRACE_S)

    def roll_back(self, version: int, sent_refs: list[Any]) -> list[str]:
        """Takes a version back, so that the one before it serves again. Returns the tensors that a
        slot does not hold as they were sent."""
        refs = [actor.remote("differing", version, *sent_refs) for actor in self.actors]
        differing = {name for names in get(self.actors, refs) for name in names}
        get(self.actors, [actor.remote("drop", version) for actor in self.actors])
        return sorted(differing)
