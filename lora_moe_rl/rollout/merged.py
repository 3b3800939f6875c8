"""A rollout engine that serves merged weights: `refit.mode=merged`.

There are no slots: the weights are of one version, and change in place. So a refit waits until no
request runs, and no request starts while it lasts; prefix-cache blocks of the version before it are
dropped. Everything is checked before the first weight is touched. What fails after that leaves
weights of no version at all, and the engine serves nothing until a whole version has passed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from lora_moe_rl.errors import EngineDied, RefitError
from lora_moe_rl.ports import Receipt
from lora_moe_rl.refit.parts import PartLayout, SentPart, check_sent, to_json, version_checksum
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.telemetry.clock import Clock

POLL_S = 0.005


class MergedRolloutEngine(RolloutEngine):
    """`newest`: the newest version that was begun, None for the base. `broken`: why the engine
    serves nothing, '' while it does."""

    newest: int | None = None
    broken = ""

    async def prepare_refit(
        self, layouts: list[PartLayout], channel: Channel = SHARED_MEMORY
    ) -> None:
        """As the base class says; and how merged weights are rounded."""
        self.layouts = layouts
        how = self.config.refit.rounding, self.config.seed
        await self._workers("refit_prepare", to_json(layouts), channel.to_json(), *how)

    async def _publish(self, version: int, sent: tuple[SentPart, ...]) -> Receipt:
        """As the base class says; but if it fails after the weights were touched, nothing is served
        until a whole version has passed."""
        if self.newest is not None and version <= self.newest:
            raise RefitError(
                f"adapter version {version} cannot be published: engine {self.index} has version "
                f"{self.newest} already, and versions only grow"
            )
        check_sent(self.layouts, sent, version)
        clock = Clock()
        try:
            await self._workers("refit_stage", version, json.dumps([asdict(part) for part in sent]))
            clock.lap("stage")
            await self._idle(version)
            clock.lap("wait")
        except EngineDied:
            raise  # with what it held
        except BaseException:
            await self._workers("refit_drop", version)
            raise
        self.newest = version
        self.receipts.clear()
        self.broken = f"its weights were being changed to adapter version {version}"
        try:
            answers = await self._workers("refit_commit", version)
        except BaseException as error:
            self.broken = f"merging adapter version {version} failed halfway: {error}"
            raise
        clock.lap("commit")
        from lora_moe_rl.kernels.merge.rounding import Arrived  # which imports torch

        self.broken = ""
        self.receipts[version] = Receipt(
            version,
            sum(part.nbytes for part in sent),
            sum(len(part.checksums) for part in sent),
            version_checksum(sent),
            clock.seconds,
            # What several workers have merged they tell alike.
            {k: Arrived(**v) for answer in answers for k, v in answer["arrived"].items()},
            max(answer["peak_gib"] for answer in answers),
        )
        return self.receipts[version]

    async def _idle(self, version: int) -> None:
        """Waits until no request runs, and forgets what they left in the prefix cache."""
        deadline = time.monotonic() + self.config.refit.timeout_s
        # vLLM refuses to reset it while a request still holds blocks.
        while sum(self.running.values()) or not await self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RefitError(
                    f"adapter version {version} cannot be merged into engine {self.index}: "
                    f"{sum(self.running.values())} requests still run after refit.timeout_s="
                    f"{self.config.refit.timeout_s:g} s; raise it, or use refit.mode=adapter, "
                    "which does not wait"
                )
            await asyncio.sleep(POLL_S)

    async def drop(self, version: int) -> None:
        """Serves `version` no more; there is none to go back to."""
        if self.receipts.pop(version, None) is not None:
            self.broken = f"adapter version {version} was taken back"
        await self._workers("refit_drop", version)

    def _lora_request(self, version: int) -> None:
        """vLLM knows nothing of versions here; `_request` checks them."""

    async def _request(self, token_ids: Sequence[int], params, version, *ends, **where):
        while self.publishing.locked():
            await asyncio.sleep(POLL_S)
        self._check_serving(version)  # no await from here until the request counts as running
        return await super()._request(token_ids, params, version, *ends, **where)

    def _check_serving(self, version: int | None) -> None:
        if self.broken:
            raise RefitError(
                f"engine {self.index} serves nothing: {self.broken}; publish a newer version to "
                "it, or resume the run from its last checkpoint"
            )
        if version is None and self.newest is not None:
            raise RefitError(
                f"engine {self.index} was asked for the base, but its weights are merged with "
                f"adapter version {self.newest}"
            )
        if version is not None and version not in self.receipts:
            raise RefitError(
                f"engine {self.index} was asked for adapter version {version}, but serves "
                f"{sorted(self.receipts) or 'the base'}: publish it first"
            )
