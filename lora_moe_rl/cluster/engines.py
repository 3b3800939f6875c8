"""The rollout engines as the controller sees them: all replicas as one.

An engine whose processes have died is started anew, up to rollout.max_restarts times a run:

    start ──> prepare its refit ──> publish the newest version ──> prove it ──> ask again

What it was asked when it died is asked again: samples depend on their seed alone, and a version is
published in full or not at all. The other engines go on meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.actors import Actor, get
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Prompt, Sample
from lora_moe_rl.errors import ActorFailed, EngineDied, LoraMoeRlError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.refit.parts import PartLayout
from lora_moe_rl.refit.receipt import Receipt
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.merged import MergedRolloutEngine

POLL_S = 0.1
REFIT_GRACE_S = 10  # an engine that gives up by itself says more than one that is given up

log = logging.getLogger(__name__)


@dataclass
class Rollout:
    """`samples` of all prompts, in order; `table_refs`: references to their routes, one an engine,
    in the same order."""

    samples: list[Sample]
    table_refs: list[Any]


@dataclass(frozen=True)
class Call:
    """What engine `index` is asked."""

    index: int
    method: str
    args: tuple
    num_returns: int = 1


class RolloutGroup:
    """`start_async` and `wait_started` come first. `prove(index, version)` is called for an engine
    that came back, and raises RefitError when it does not serve the version."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        placement: Placement,
        prove: Callable[[int, int], None],
    ):
        self.config, self.spec, self.model_dir, self.run_dir = config, spec, model_dir, run_dir
        self.placement, self.prove = placement, prove
        self.restarts = 0
        self.prepared: tuple[list[PartLayout], Channel] | None = None
        self.published: tuple[int, list[Any]] | None = None  # by all engines: version, its parts
        self.actors = [self._actor(index) for index in range(config.rollout.engines)]

    def _actor(self, index: int) -> Actor:
        merged = self.config.refit.mode == "merged"
        engine_class = MergedRolloutEngine if merged else RolloutEngine
        engine = ray.remote(engine_class).options(**self.placement.engine(index))
        name = f"engine-{index}"
        log_path = str(self.run_dir.log_path(name))
        handle = engine.remote(self.config, str(self.model_dir), self.spec, index, log_path)
        return Actor(handle, name, self.run_dir)

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
        calls = []
        for index, share in enumerate(shares):
            if len(share):
                token_ids = [prompts[i].token_ids for i in share]
                args = (token_ids, [int(i) for i in share], n, version, seed)
                calls.append(Call(index, "generate", args, num_returns=2))
        refs = self._ask(calls, progress=progress)
        parts = ray.get([samples for samples, _ in refs])
        return Rollout([s for part in parts for s in part], [table for _, table in refs])

    def score(self, sequences: list[list[int]], version: int | None):
        """Logprobs from each engine, and references to the routes of each."""
        refs = self._ask(self._all("score", sequences, version, num_returns=2))
        return ray.get([scores for scores, _ in refs]), [table for _, table in refs]

    def score_by(self, index: int, sequences: list[list[int]], version: int | None):
        """Logprobs from one engine, and a reference to its routes."""
        scores, table = self.actors[index].remote("score", sequences, version, num_returns=2)
        return get([self.actors[index]], [scores])[0], table

    def prepare_refit(self, layouts: list[PartLayout], channel: Channel) -> None:
        self._ask(self._all("prepare_refit", layouts, channel))
        self.prepared = layouts, channel

    def publish(self, version: int, sent_refs: list[Any]) -> list[Receipt]:
        """Every engine takes the version, or the run stops. The parts stay as they are until the
        next version: engines that come back take it from them too."""
        self.published = None  # the parts of the last version are written over
        calls = self._all("publish", version, *sent_refs)
        # An engine may wait as long for a slot and again for its workers.
        refs = self._ask(calls, 2 * self.config.refit.timeout_s + REFIT_GRACE_S)
        self.published = version, sent_refs
        return ray.get([ref for (ref,) in refs])

    def roll_back(self, version: int, sent_refs: list[Any]) -> list[str]:
        """Takes a version back, so that the one before it serves again. Returns the tensors that a
        slot does not hold as they were sent."""
        refs = [actor.remote("differing", version, *sent_refs) for actor in self.actors]
        differing = {name for names in get(self.actors, refs) for name in names}
        get(self.actors, [actor.remote("drop", version) for actor in self.actors])
        return sorted(differing)

    def _all(self, method: str, *args: Any, num_returns: int = 1) -> list[Call]:
        return [Call(index, method, args, num_returns) for index in range(len(self.actors))]

    def _ask(
        self,
        calls: Sequence[Call],
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Any]]:
        """References to what each call returns, once all have returned.

        Raises what an engine raises, and ActorFailed when one is silent for `timeout` seconds or
        dies more often than is allowed. (A silent engine is not started anew: it may be busy.)
        """
        refs = [self._send(call) for call in calls]
        waiting = set(range(len(calls)))
        heard = time.monotonic()
        while waiting:
            firsts = {refs[i][0]: i for i in waiting}
            for ref in ray.wait(list(firsts), num_returns=len(firsts), timeout=POLL_S)[0]:
                i, heard = firsts[ref], time.monotonic()
                actor = self.actors[calls[i].index]
                try:
                    get([actor], [ref])
                    waiting.remove(i)
                except LoraMoeRlError as error:
                    self._bring_back(calls[i].index, error)
                    refs[i], heard = self._send(calls[i]), time.monotonic()
            if timeout is not None and waiting and time.monotonic() - heard > timeout:
                silent = [self.actors[calls[i].index] for i in sorted(waiting)]
                names = ", ".join(actor.name for actor in silent)
                tail = self.run_dir.tail(silent[0].name)
                raise ActorFailed(names, f"no answer within {timeout:.0f} s", tail)
            if progress is not None:
                progress(self._num_completed(call.index for call in calls))
        return refs

    def _send(self, call: Call) -> list[Any]:
        refs = self.actors[call.index].remote(call.method, *call.args, num_returns=call.num_returns)
        return refs if call.num_returns > 1 else [refs]

    def _num_completed(self, indices: Any) -> int:
        """0 from an engine that has died, which its call tells of."""
        total = 0
        for ref in [self.actors[index].remote("completed") for index in indices]:
            with contextlib.suppress(RayError):
                total += int(ray.get(ref))
        return total

    def _bring_back(self, index: int, error: LoraMoeRlError) -> None:
        """Starts a dead engine anew, until it lives. Raises `error` when it is no death."""
        started = time.perf_counter()
        while True:
            self._count(index, error)
            try:
                self._start_anew(index)
                break
            except LoraMoeRlError as again:
                error = again
        served = "" if self.published is None else f" and serves version {self.published[0]}"
        log.warning(
            "engine-%d is back%s, %.1f s later", index, served, time.perf_counter() - started
        )

    def _count(self, index: int, error: LoraMoeRlError) -> None:
        """Counts a death. Raises `error` when it is none, ActorFailed beyond the bound."""
        if not _is_death(error):
            raise error
        actor, limit = self.actors[index], self.config.rollout.max_restarts
        reason = error.reason if isinstance(error, ActorFailed) else str(error)
        if self.restarts >= limit:
            reason += (
                f"; {self.restarts} restarts so far, and rollout.max_restarts={limit} "
                "allows no more. The run can go on with --resume"
            )
            raise ActorFailed(actor.name, reason, self.run_dir.tail(actor.name)) from error
        self.restarts += 1
        log.warning(
            "%s died (%s): starting it anew, restart %d of rollout.max_restarts=%d; its log: %s",
            *(actor.name, reason, self.restarts, limit, self.run_dir.log_path(actor.name)),
        )

    def _start_anew(self, index: int) -> None:
        ray.kill(self.actors[index].handle)  # may live on around a vLLM that has died
        actor = self.actors[index] = self._actor(index)
        get([actor], [actor.remote("start")], self.config.rollout.start_timeout_s)
        if self.prepared is not None:
            get([actor], [actor.remote("prepare_refit", *self.prepared)])
        if self.published is not None:
            version, sent_refs = self.published
            timeout = 2 * self.config.refit.timeout_s + REFIT_GRACE_S
            get([actor], [actor.remote("publish", version, *sent_refs)], timeout)
            self.prove(index, version)


def _is_death(error: LoraMoeRlError) -> bool:
    return isinstance(error, EngineDied) or isinstance(error.__cause__, RayActorError)
