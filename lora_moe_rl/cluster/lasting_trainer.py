"""The trainer as the run sees it: ranks that die or hang are started anew, and nobody else notices.

    a rank dies, hangs, or its process group breaks
      ──> all ranks are ended ──> others start ──> adapter and moments as they were after the newest
          step ──> parts of its version are sent again ──> what was asked is asked again

After each step every rank leaves a copy of its part of the state in Ray's object store, which is
another process of its host. An update that was broken off is done once more from it, on the same
batch and routes, and so comes to the same bits. Without a copy the checkpoint of that very step
does; without either the run ends, by name. Engines, tickets and samples stay as they are meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from ray.exceptions import RayError, RayTaskError

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.algorithms.base import Pass
from lora_moe_rl.cluster import stacks
from lora_moe_rl.cluster.in_thread import in_thread
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import ActorFailed, ActorSilent, LoraMoeRlError, RefitError
from lora_moe_rl.files import checkpoint
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.files.trainer_state import Saved
from lora_moe_rl.ports import Ref, Trainer
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.telemetry import names

BYTES_A_WEIGHT = 3 * 4  # the weight and two moments, float32

log = logging.getLogger(__name__)
T = TypeVar("T")


class Ranks(Trainer, Protocol):
    """What `cluster/trainer.py` is to this."""

    dtype: Dtype

    @property
    def places(self) -> list[stacks.Place]: ...

    def end(self) -> None: ...

    def start_anew(self) -> None: ...

    async def copy(self) -> list[Ref]: ...

    def load_copy(self, parts: Sequence[Ref]) -> None: ...

    async def check_alive(self) -> None: ...

    @property
    def parts_last(self) -> bool: ...

    def send_now(self) -> list[Ref]: ...

    def sent_now(self, parts: Sequence[Ref]) -> list[SentPart]: ...

    def set_adapter(self, tensors: dict[str, np.ndarray]) -> None: ...

    def set_reference(self, read: Callable[[], dict[str, np.ndarray]]) -> None: ...


class Parts(list[Any]):
    """References to the parts of a version. When ranks are started anew they are those of the new
    ranks: who keeps this list has what can be fetched."""


class LastingTrainer:
    """`hold` comes first, once the ranks hold what the run goes on from. `restarts` so far."""

    def __init__(self, ranks: Ranks, config: RunConfig, run_dir: RunDir, copied: bool):
        """`copied`: whether a copy is held (see `fits`)."""
        self.ranks, self.config, self.run_dir, self.copied = ranks, config, run_dir, copied
        self.restarts = 0
        self.done = 0  # the step after which the state is as it is held
        self.saved: int | None = None  # the step of this life's newest checkpoint
        self.parts, self._sent = Parts(), list[SentPart]()
        self._copy: list[Ref] | None = None
        self._lives = 0
        self._starting = threading.Lock()

    @property
    def dtype(self) -> Dtype:
        return self.ranks.dtype

    @property
    def places(self) -> list[stacks.Place]:
        return self.ranks.places

    def load(self, directory: Path, meta: dict) -> None:
        self.ranks.load(directory, meta)

    def set_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        self.ranks.set_adapter(tensors)

    def set_reference(self, read: Callable[[], dict[str, np.ndarray]]) -> None:
        self.ranks.set_reference(read)

    async def hold(self, step: int) -> None:
        """Keeps what the ranks hold now, after `step`, as what they go on from."""
        self._copy, _ = await self._copied()
        self.done = step

    async def update(
        self, batch: TrainBatch, routes: Sequence[Ref]
    ) -> tuple[UpdateResult, list[Ref]]:
        async def update() -> tuple[UpdateResult, list[Ref], list[SentPart], list[Ref] | None]:
            result, parts = await self.ranks.update(batch, routes)
            sent, (copy, seconds) = await asyncio.gather(self.ranks.sent(parts), self._copied())
            result.metrics[names.COPIES] = seconds
            return result, parts, sent, copy

        result, parts, sent, copy = await self._lasting(update)
        self._copy, self.done = copy, batch.step
        self.parts, self._sent = Parts(parts), sent
        result.metrics[names.TRAINER_RESTARTS] = self.restarts
        return result, self.parts

    async def _copied(self) -> tuple[list[Ref] | None, float]:
        """A copy of what the ranks hold, and the seconds it took."""
        started = time.perf_counter()
        copy = await self.ranks.copy() if self.copied else None
        return copy, time.perf_counter() - started

    async def send(self) -> list[Ref]:
        async def send() -> tuple[list[Ref], list[SentPart]]:
            parts = await self.ranks.send()
            return parts, await self.ranks.sent(parts)

        parts, self._sent = await self._lasting(send)
        self.parts = Parts(parts)
        return self.parts

    async def sent(self, parts: Sequence[Ref]) -> list[SentPart]:
        return await self._lasting(lambda: self.ranks.sent(parts))

    async def score(
        self, sequences: Sequence[Sequence[int]], routes: Ref | None, adapters: bool = True
    ) -> list[np.ndarray]:
        return await self._lasting(lambda: self.ranks.score(sequences, routes, adapters))

    async def judge(self, batch: TrainBatch) -> dict[Pass, list[np.ndarray]]:
        return await self._lasting(lambda: self.ranks.judge(batch))

    async def score_ahead(self, sequences: Sequence[Sequence[int]]) -> None:
        await self.ranks.score_ahead(sequences)

    def save(self, directory: Path) -> Saved:
        while True:
            life = self._lives
            try:
                saved = self.ranks.save(directory)
            except LoraMoeRlError as error:
                self._return(life, error)
            else:
                self.saved = self.done
                return saved

    async def renew(self) -> bool:
        """Looks whether a rank has died since its part was sent; starts all anew then, and returns
        True: the parts are others."""
        life = self._lives
        try:
            await self.ranks.check_alive()
        except LoraMoeRlError as error:
            await self._returned(life, error)
        return self._lives != life

    async def _lasting(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            life = self._lives
            try:
                return await call()
            except LoraMoeRlError as error:
                await self._returned(life, error)

    async def _returned(self, life: int, error: LoraMoeRlError) -> None:
        await in_thread("trainer restart", lambda: self._return(life, error))

    def _return(self, life: int, error: LoraMoeRlError) -> None:
        """Starts the ranks anew that failed with `error` in their `life`, unless somebody else has
        by now. Raises `error` when it is not the end of a rank, and beyond the bound."""
        with self._starting:
            if self._lives != life:
                return
            started = time.perf_counter()
            while True:
                self._count(error)
                try:
                    self._start_anew()
                    break
                except LoraMoeRlError as another:
                    error = another
            self._lives += 1
            seconds = time.perf_counter() - started
            log.warning(
                "all trainer ranks are back after step %d, %.1f s later", self.done, seconds
            )

    def _count(self, error: LoraMoeRlError) -> None:
        """Counts a restart, and ends all ranks. Raises `error` where there is none."""
        if not is_lost(error):
            raise error
        assert isinstance(error, ActorFailed)
        reason, limit = error.reason, self.config.trainer.max_restarts
        if self.restarts >= limit:
            reason += (
                f"; the ranks were started anew {self.restarts} times, and trainer.max_restarts="
                f"{limit} allows no more. The run can go on with --resume"
            )
            raise type(error)(error.actor, reason, error.log_tail) from error
        self.restarts += 1
        if isinstance(error, ActorSilent):
            stacks.dump(self.ranks.places)
        self.ranks.end()
        log.warning(
            "%s failed (%s): all trainer ranks are ended and started anew, restart %d of "
            "trainer.max_restarts=%d; its log: %s",
            *(error.actor, reason, self.restarts, limit),
            self.run_dir.log_path(error.actor.partition(",")[0]),
        )

    def _start_anew(self) -> None:
        if self._copy is None:
            path, meta = self._checkpoint()
            self.ranks.start_anew()
            self.ranks.load(path, meta)
        else:
            self.ranks.start_anew()
            self.ranks.load_copy(self._copy)
        if self.parts and not self.ranks.parts_last:
            fresh = self.ranks.send_now()
            self._check_same(self.ranks.sent_now(fresh))
            self.parts[:] = fresh

    def _checkpoint(self) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint. Raises ActorFailed when it is not of the step that is held."""
        found = None
        if self.saved == self.done:
            found = checkpoint.newest_valid(self.run_dir.checkpoints)
        if found is None or found.path is None or found.metadata["step"] != self.done:
            raise ActorFailed(
                "trainer",
                f"its ranks have ended, no copy of their state is held (trainer.max_copy_gib="
                f"{self.config.trainer.max_copy_gib:g}), and there is no checkpoint of step "
                f"{self.done}. The run can go on with --resume",
            )
        return found.path, found.metadata["trainer"]

    def _check_same(self, sent: list[SentPart]) -> None:
        """Raises RefitError when the new ranks send another adapter than the old ones had sent."""
        before = [part.checksums for part in self._sent]
        if [part.checksums for part in sent] != before:
            raise RefitError(
                f"trainer ranks that were started anew hold another adapter than those before had "
                f"after step {self.done}; go on from the newest checkpoint with --resume"
            )


def fits(config: RunConfig, spec: AdapterSpec) -> bool:
    """Whether a copy of the state is held: it is no larger than trainer.max_copy_gib, and of use.
    All ranks together hold each weight in it once."""
    if not config.trainer.max_restarts:
        return False
    specs = [spec]
    if algorithms.make(config).critic is not None:
        specs.append(spec.of_critic())
    weights = sum(math.prod(shape) for one in specs for shape in one.tensor_shapes.values())
    return weights * BYTES_A_WEIGHT <= config.trainer.max_copy_gib * 2**30


def is_lost(error: LoraMoeRlError) -> bool:
    """Whether ranks have to be started anew: one has died or hangs, or their process group is
    broken. An exception of a rank's own is none of these: it would come again."""
    cause = error.__cause__
    if not isinstance(error, ActorFailed):
        return False
    ended = isinstance(cause, RayError) and not isinstance(cause, RayTaskError)
    return isinstance(error, ActorSilent) or ended or _is_broken_group(cause)


def _is_broken_group(error: BaseException | None) -> bool:
    """torch.distributed's own errors, and gloo's, which are known by the file that they name."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in kinds or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
