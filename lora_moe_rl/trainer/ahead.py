"""Logprobs of sequences that are found before they are asked for.

A proof wants the trainer's logprobs on the routes that an engine took. While the engine still takes
the version and scores, the ranks score the same sequences, and their routers choose. Where the
engine then turns out to have chosen the same experts for every token, the forward on its routes is
spared: it would come to the same but for last bits, where a token's experts, or the products of a
matrix, are summed in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.router_replay.routes import Fed, Routes
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.trainer.engine import TrainingEngine, Work

PAUSE = 16  # versions without, after one whose routes were others: near ties come again


@dataclass(frozen=True)
class _Found:
    version: int
    sequences: list[list[int]]
    works: list[Work]


class Ahead:
    """`begin` and `score` are called on all ranks together. `spared` forwards so far."""

    def __init__(self, engine: TrainingEngine):
        self.engine, self.spared = engine, 0
        self._found: _Found | None = None
        self._pause = 0

    def begin(self, sequences: Sequence[Sequence[int]]) -> None:
        """Scores what `score` will be asked for next, unless that was of no use lately."""
        self._found = None
        if self._pause:
            self._pause -= 1
            return
        batch, engine = TrainBatch.from_sequences(sequences), self.engine
        with engine.watched_replay(batch, None):
            works = engine.my_work(batch, range(len(batch)), None, 1, 0)
            engine.forward(works, "score", temperature=1.0, record=True)
        self._found = _Found(engine.version, [list(ids) for ids in sequences], works)

    def forget(self) -> None:
        """The adapter is another now, with the same version."""
        self._found = None

    def score(
        self, sequences: Sequence[Sequence[int]], table: RouteTable | None
    ) -> list[np.ndarray] | None:
        """As `TrainingEngine.score`, with the current version's adapter."""
        batch, parts = TrainBatch.from_sequences(sequences), () if table is None else (table,)
        works = self._works(sequences)
        routes = None if works is None else self.engine.routes(batch, parts)
        same = works is not None and (routes is None or self._chosen(works, routes, batch.fed))
        # Ranks differ: each sees its own layers and tokens, and one may have been started anew.
        agreed = torch.tensor([float(works is not None), float(same)])
        agreed = agreed.to(self.engine.device.torch_device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        there, equal = agreed.tolist()
        if there and not equal:
            self._pause = PAUSE
        if works is None or not equal:
            return self.engine.score(batch, *parts)
        self.spared += 1
        return self.engine.scores_in(works, len(batch))

    def _works(self, sequences: Sequence[Sequence[int]]) -> list[Work] | None:
        """What was found of these sequences by the adapter as it is now."""
        found = self._found
        if found is None or found.version != self.engine.version:
            return None
        return found.works if found.sequences == [list(ids) for ids in sequences] else None

    def _chosen(self, works: Sequence[Work], routes: Routes, fed: Fed) -> bool:
        """Whether these routes are those that this rank's routers chose."""
        replay, device = self.engine.replay, self.engine.device.torch_device
        routes.fetch((sample for work in works for sample in work.data.samples), fed)
        return all(
            replay.chose(micro, work.recorded, device)
            for work in works
            for micro in routes.micro(work.data)
            if micro is not None
        )
