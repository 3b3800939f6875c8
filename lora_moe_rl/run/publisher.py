"""An adapter version from the trainer into every engine, and the proof that it is served.

    parts ──channel──> slots of v+1 ──> probe scored by engine and trainer ──> served
                                                    │ not as it should be
                                                    └──> rolled back to v, and the run stops

Both ends learn once what will go from which trainer rank to which engine rank (the plan). A version
is published in full or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.errors import RefitError
from lora_moe_rl.ports import Channel, Engines, Ref, Trainer
from lora_moe_rl.refit.parts import STORAGE, PartLayout, check_complete, part_layouts
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.refit.proof import Proof, check_served, default_tolerance, probe_sequences
from lora_moe_rl.rollout.facts import Dtype, slot_rank
from lora_moe_rl.telemetry.clock import Clock


def plan_layouts(config: RunConfig, spec: AdapterSpec, dtype: Dtype) -> list[PartLayout]:
    """What each trainer rank sends. `dtype` is that of the engines. Raises RefitError when the
    parts would not be all of the adapter."""
    engine = EngineLayout.of(config.rollout, slot_rank(spec), config.refit.mode == "merged")
    plan = make_plan(spec, config.trainer, engine, STORAGE[dtype].itemsize)
    layouts = part_layouts(plan, spec, dtype)
    check_complete(layouts, spec, engine)
    return layouts


class Publisher:
    """`version` is the newest one that is served; -1 before the first. `dtype` is the trainer's."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        engines: Engines,
        channel: Channel,
        source: PromptSource,
        dtype: Dtype,
        first_version: int = 0,
    ):
        self.config, self.trainer, self.engines = config, trainer, engines
        self.channel, self.source = channel, source
        self.tolerance = config.refit.proof_tolerance or default_tolerance(dtype)
        self.first_version, self.version = first_version, -1
        self.probe: list[list[int]] = []
        self.engine_base: list[list[np.ndarray]] = []
        self.trainer_base: list[np.ndarray] = []

    async def start(self) -> None:
        """Serves the trainer's adapter for the first time."""
        parts = await self.trainer.send()
        self.probe = self._probe()
        self.engine_base, routes = await self.engines.score(self.probe, None)
        self.trainer_base = await self.trainer.score(self.probe, routes[0], adapters=False)
        await self._serve(self.first_version, parts)

    async def publish(self, version: int, parts: Sequence[Ref]) -> dict[str, float]:
        """Serves `version`, proves that it is served, and forgets the oldest. Returns metrics.

        Raises RefitError when an engine refuses it or does not serve it; the version before is then
        served again. A version that is served already (its update was skipped) costs nothing.
        """
        if version == self.version:
            return {"refit/seconds": 0.0, "refit/bytes": 0, "refit/max_diff": 0.0}
        return await self._serve(version, parts)

    async def prove_returned(self, index: int, version: int) -> None:
        """Proves that engine `index`, which was started anew, serves `version`."""
        one = [index]
        if self.config.refit.mode == "adapter":  # merged weights hold the base no more
            (self.engine_base[index],), _ = await self.engines.score(self.probe, None, one)
        await self._prove(version, one)

    async def _serve(self, version: int, parts: Sequence[Ref]) -> dict[str, float]:
        clock = Clock()
        await self.channel.published(lambda: self.trainer.sent(parts))
        receipts = await self.engines.publish(version, parts)
        self.channel.keep(range(version - self.config.refit.slots + 1, version + 1))
        try:
            proofs = await self._prove(version)
        except RefitError as error:
            differing = await self.engines.roll_back(version, parts)
            found = f"engines hold something else than was sent in {', '.join(differing)}"
            same = "what can be read back of the engines is what was sent"
            raise RefitError(f"{error}; {found if differing else same}") from error
        self.version = version
        clock.lap("refit")
        return {
            "refit/seconds": clock.seconds["total"],
            "refit/bytes": sum(receipt.bytes for receipt in receipts),
            "refit/max_diff": max(proof.max_diff for proof in proofs),
        }

    def _probe(self) -> list[list[int]]:
        """The next prompts, each twice over."""
        state = self.source.state_dict()
        prompts = self.source.next(self.config.refit.proof_prompts)
        self.source.load_state_dict(state)
        prompts = [prompt.token_ids for prompt in prompts]
        return probe_sequences(prompts, self.config.model.max_length)

    async def _prove(self, version: int, engines: Sequence[int] | None = None) -> list[Proof]:
        """One proof an engine, of all of them by default."""
        scores, routes = await self.engines.score(self.probe, version, engines)
        indices = range(len(self.engine_base)) if engines is None else engines
        trainer = await self.trainer.score(self.probe, routes[0])
        return [
            check_served(
                found,
                trainer,
                self.engine_base[index],
                self.trainer_base,
                self.tolerance,
                version,
            )
            for index, found in zip(indices, scores, strict=True)
        ]
