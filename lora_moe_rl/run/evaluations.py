"""When a run evaluates, and who waits for it.

schedule.lag 0    sampling and training wait: the engines do one thing at a time, and what they
                  batch together in training is as it is without evaluation
schedule.lag > 0  training goes on. The version keeps a slot of its own meanwhile (refit.slots).
                  The next evaluation waits for this one, and the trainer with it; so does the next
                  checkpoint: what a run goes on from lacks no evaluation before its step
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container
from typing import Protocol

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import EngineDied
from lora_moe_rl.ports import Sampler
from lora_moe_rl.run.tickets import TicketBook

log = logging.getLogger(__name__)


class Evaluates(Protocol):
    """What makes one evaluation: run/evaluator.py."""

    async def evaluate(self, step: int, version: int) -> None: ...


class Evaluations:
    """`recorded`: the steps whose evaluation an earlier life of the run has on record."""

    def __init__(
        self, config: RunConfig, evaluator: Evaluates, engines: Sampler, recorded: Container[int]
    ):
        self.config, self.evaluator, self.engines = config, evaluator, engines
        self.recorded = recorded
        self._beside: asyncio.Task[None] | None = None
        self._taken = -1  # the newest step whose evaluation was begun
        self._failed: Exception | None = None  # what one beside training has ended with

    def is_due(self, step: int, last: bool = False) -> bool:
        if step in self.recorded or step == self._taken:
            return False
        return self.config.eval.is_due(step, step if last else self.config.trainer.steps)

    async def take(
        self,
        step: int,
        version: int,
        book: TicketBook,
        tasks: asyncio.TaskGroup,
        last: bool = False,
    ) -> None:
        """Evaluates `version`, the newest one, which `step` has made, if that is due: returns when
        it is done, or with schedule.lag at once. `book` and `tasks` are those of the run. `last`:
        the run ends with this step, whatever trainer.steps. Raises what it fails with, as
        RewardError when too many of its rewards have failed, and what one that went on beside
        training has failed with."""
        self.check()
        if not self.is_due(step, last):
            return
        self._taken = step
        await self.ended()
        self.check()
        if not self.config.schedule.lag:
            with book.held("an evaluation"):
                await self.evaluator.evaluate(step, version)
            return
        await self.engines.pin(version)
        self._beside = tasks.create_task(self._pinned(step, version))

    def check(self) -> None:
        """Raises what an evaluation beside training has ended with, if that ends the run: too many
        rewards that have failed, an engine that is lost."""
        if self._failed is not None:
            raise self._failed

    async def ended(self) -> None:
        """Waits until none is under way. What it has failed with is for `check` to raise."""
        if self._beside is not None:
            await asyncio.wait([self._beside])

    async def _pinned(self, step: int, version: int) -> None:
        try:
            await self.evaluator.evaluate(step, version)
        except EngineDied as error:
            log.warning(
                "step %d has no evaluation: %s; the engines that came back have newer versions",
                *(step, error),
            )
        except Exception as error:  # the run ends with a checkpoint, no task's to write
            self._failed = error
        await self.engines.pin(None)
