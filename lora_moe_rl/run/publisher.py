"""An adapter version from the trainer into every engine, and the proof that it is served.

    parts ──channel──> slots of v+1 ──> probe scored by engine and trainer ──> served
                                          │         │ not as it should be        ↑
                                          │         └──> taken back, and the run stops
                                          └ cannot tell ──> slots compared ──────┘

Both ends learn once what will go from which trainer rank to which engine rank (the plan). A version
is published in full or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.errors import LoraMoeRlError, RefitError
from lora_moe_rl.ports import Channel, Engines, Prompts, Ref, Scored, Trainer
from lora_moe_rl.refit.parts import STORAGE, PartLayout, check_complete, part_layouts
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.refit.proof import (
    Proof,
    check_pieces,
    check_served,
    pieces,
    probe_sequences,
    tolerance_of,
)
from lora_moe_rl.rollout.facts import Dtype, slot_rank
from lora_moe_rl.telemetry.clock import Clock
from lora_moe_rl.telemetry.names import MEMORY_ENGINES, PROOF_SECONDS

if TYPE_CHECKING:
    from lora_moe_rl.kernels.merge.rounding import Arrived

# Of ||change|| / ||weights||: below it, float32 sums lose a change too, and no logprob shows it.
NEGLIGIBLE = 1e-6

log = logging.getLogger(__name__)


def plan_layouts(config: RunConfig, spec: AdapterSpec, dtype: Dtype) -> list[PartLayout]:
    """What each trainer rank sends. `dtype` is that of the engines. Raises RefitError when the
    parts would not be all of the adapter."""
    engine = EngineLayout.of(config.rollout, slot_rank(spec), config.refit.mode == "merged")
    plan = make_plan(spec, config.trainer, engine, STORAGE[dtype].itemsize)
    layouts = part_layouts(plan, spec, dtype)
    check_complete(layouts, spec, engine)
    return layouts


@dataclass
class Known:
    """What was found of one engine on the probe: by the engine and by the trainer of the bare base,
    and by the trainer of the versions that were served last; always with that engine's routes."""

    engine_base: list[np.ndarray]
    trainer_base: list[np.ndarray]
    served: dict[int, list[np.ndarray]] = field(default_factory=dict)


class Publisher:
    """`version` is the newest one that is served; -1 before the first. `dtype` is the trainer's."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        engines: Engines,
        channel: Channel,
        source: Prompts,
        dtype: Dtype,
        first_version: int = 0,
    ):
        self.config, self.trainer, self.engines = config, trainer, engines
        self.channel, self.source = channel, source
        eight_bits = config.trainer.fp8_forward == "engine"
        self.tolerance = tolerance_of(dtype, eight_bits, config.refit.proof_tolerance)
        self.first_version, self.version = first_version, -1
        self.parts: Sequence[Ref] = ()  # of the version that is served, or about to be
        self.probe: list[list[int]] = []
        self.known: dict[int, Known] = {}  # by engine
        self.of_served: dict[str, float] = {}  # metrics of the version that is served
        self.warned = False
        self.compared = -1  # the version at which what engines hold was compared last

    async def start(self) -> None:
        """Serves the trainer's adapter for the first time."""
        parts = await self.trainer.send()
        self.probe = self._probe()
        await self._meet()
        await self._serve(self.first_version, parts, ())

    async def _meet(self) -> None:
        """What engines that are new here and the trainer give for the bare base."""
        new = [index for index in self.engines.present if index not in self.known]
        if new:
            found = await self._score(self.probe, None, new)
            self.known |= {index: Known(*pair) for index, pair in found.items()}

    async def publish(
        self, version: int, parts: Sequence[Ref], samples: Sequence[Sample]
    ) -> dict[str, float]:
        """Serves `version`, proves that it is served, and forgets the oldest. `samples` are those
        it was trained on: the proof takes a few of them too. Returns metrics.

        Raises RefitError when an engine refuses it or does not serve it; the version before is then
        served again, if an engine can hold two (refit.slots). A version that is served already (its
        update was skipped) goes to engines that came back meanwhile, if there are any.
        """
        if version == self.version:
            nothing = ("seconds", "proof_seconds", "bytes", "max_diff", "told", "compared")
            self.parts = parts
            # Ranks that were started anew have offered it again.
            await self.channel.published(lambda: self.trainer.sent(parts))
            new = await self.engines.keep(version, parts)
            back = await self.engines.come_back()
            for index in new:
                await self.prove_returned(index, version)
            self.engines.go_on()
            return self.of_served | {f"refit/{name}": 0 for name in nothing} | back
        return await self._serve(version, parts, samples)

    async def prove_returned(self, index: int, version: int) -> None:
        """Proves that engine `index`, which was started anew, serves `version`, and holds it as it
        was sent."""
        known, one = self.known.setdefault(index, Known([], [])), [index]
        if self.config.refit.mode == "adapter":  # merged weights hold the base no more
            found = await self._score(self.probe, None, one)
            if index not in found:  # it has left the run
                return
            known.engine_base, known.trainer_base = found[index]
        await self._prove(version, (), one)
        await self._compare(version, one)

    async def _serve(
        self, version: int, parts: Sequence[Ref], samples: Sequence[Sample]
    ) -> dict[str, float]:
        """Nothing goes on under a version that is not proven."""
        clock, self.parts = Clock(), parts
        if not self.config.placement.colocated:  # where the engines have the devices now
            await self.trainer.score_ahead(self._sequences(version, samples))
        await self.channel.published(lambda: self.trainer.sent(parts))
        receipts = await self.engines.publish(version, parts)
        back = await self.engines.come_back()
        clock.lap("publish")
        self.channel.keep(range(version - self.config.refit.slots + 1, version + 1))
        try:
            self._check_arrived(version, receipts[0].arrived)  # all engines' weights are equal
            await self._meet()
            while not (proofs := await self._prove(version, samples)):
                await self.engines.all_back()  # all have left over it: those that stand in
            told = all(proof.told for proof in proofs)
            compared = not told or self._is_compared(version)
            if compared:
                await self._compare(version)
                self.compared = version
            clock.lap("proof")
        except RefitError as error:
            raise await self._taken_back(version, error) from error
        self.version = version
        self.engines.go_on()
        if self.config.schedule.in_flight == "continue":
            await self.engines.move_on(version)
        clock.lap("refit")
        self.of_served[MEMORY_ENGINES] = max(receipt.peak_gib for receipt in receipts)
        self.of_served["rollout/engines"] = len(self.engines.present)
        found = self.of_served | back
        return found | {
            "refit/seconds": clock.seconds["total"],
            PROOF_SECONDS: clock.seconds["proof"],
            "refit/bytes": sum(receipt.bytes for receipt in receipts),
            "refit/max_diff": max(proof.max_diff for proof in proofs),
            "refit/told": int(told),
            "refit/compared": int(compared),
        }

    def _check_arrived(self, version: int, arrived: Mapping[str, Arrived]) -> None:
        """What rounding left of a merged version's change, for the metrics. Raises RefitError when
        it lost more than refit.stop_lost; warns once above refit.warn_lost. A negligible change
        is not judged, but where none was wanted nothing may have changed."""
        if not arrived:
            return
        from lora_moe_rl.kernels.merge.rounding import Arrived  # which imports torch

        every = Arrived()
        for one in arrived.values():
            every.add(one)
        self.of_served |= {
            "refit/lost": every.lost,
            "refit/error_over_change": every.error_over_change,
            "refit/cosine": every.cosine,
        }
        refit = self.config.refit
        if every.lost <= refit.warn_lost or 0 < every.change < NEGLIGIBLE**2 * every.value:
            return
        name, worst = max(arrived.items(), key=lambda item: item[1].lost)
        found = f"adapter version {version}, merged and rounded: {every}; worst is {name}: {worst}"
        out = "use refit.rounding=stochastic, or refit.mode=adapter, which rounds no sum"
        if not every.lost <= refit.stop_lost:
            raise RefitError(f"{found}. That is above refit.stop_lost={refit.stop_lost:g}: {out}")
        if not self.warned:
            log.warning("%s. That is above refit.warn_lost=%g: %s", found, refit.warn_lost, out)
        self.warned = True

    def _is_compared(self, version: int) -> bool:
        """Whether engines compare what they hold with what they were sent though the proof could
        tell."""
        every = self.config.refit.compare_every
        return version == self.first_version or (every > 0 and version >= self.compared + every)

    async def _compare(self, version: int, engines: Sequence[int] | None = None) -> None:
        if names := await self.engines.differing(version, self.parts, engines):
            raise RefitError(f"adapter version {version} is not served: {_differ(names)}")

    async def _taken_back(self, version: int, error: RefitError) -> RefitError:
        """Takes a version back that is not served as it should be. Returns what there is to say."""
        message = str(error)
        try:
            names = await self.engines.roll_back(version, self.parts)
        except LoraMoeRlError as second:
            return RefitError(f"{message}; nor could it be taken back: {second}")
        found = _differ(names) if names else "what can be read back of the engines is what was sent"
        if found not in message:
            message += f"; {found}"
        if self.version < 0 or self.config.refit.mode == "merged" or self.config.refit.slots == 1:
            message += "; engines serve no version now, there is none to go back to"
        return RefitError(message)

    def _probe(self) -> list[list[int]]:
        """The next prompts, each twice over."""
        state = self.source.state_dict()
        prompts = self.source.next(self.config.refit.proof_prompts)
        self.source.load_state_dict(state)
        prompts = [prompt.token_ids for prompt in prompts]
        return self._everywhere(probe_sequences(prompts, self.config.model.max_length))

    def _everywhere(self, sequences: Sequence[list[int]]) -> list[list[int]]:
        """Each once for every data-parallel rank of an engine: they take turns."""
        return [ids for ids in sequences for _ in range(self.config.rollout.dp)]

    async def _prove(
        self, version: int, samples: Sequence[Sample], engines: Sequence[int] | None = None
    ) -> list[Proof]:
        """One proof of each data-parallel rank of each engine, by default of those present. What
        the trainer gave is kept, for the versions after it to be told from this one."""
        config, size = self.config, len(self.probe)
        sequences = self._sequences(version, samples)
        scores = await self._score(sequences, version, engines)
        proofs = []
        for index, (ours, theirs) in scores.items():
            known = self.known[index]
            older = {number: found for number, found in known.served.items() if number != version}
            base = known.engine_base, known.trainer_base
            of_ranks = []
            for rank in range(ranks := config.rollout.dp):
                mine = slice(rank, size, ranks)
                others = {number: found[mine] for number, found in older.items()}
                scored = [scores[mine] for scores in (ours, theirs, *base)]
                of_ranks.append(check_served(*scored, self.tolerance, version, others))
            most, near = check_pieces(ours[size:], theirs[size:], self.tolerance, version)
            proofs += [
                replace(one, max_diff=max(one.max_diff, most), told=one.told and near)
                for one in of_ranks
            ]
            known.served[version] = theirs[:size]
            for number in sorted(known.served)[: -config.refit.slots]:
                del known.served[number]
        return proofs

    def _sequences(self, version: int, samples: Sequence[Sample]) -> list[list[int]]:
        """What a version is proven on: the probe, and pieces of what it was trained on."""
        lengths = [sample.num_tokens for sample in samples]
        config, count = self.config, self.config.refit.proof_prompts
        drawn = pieces(lengths, count, config.model.max_length, (config.seed, version))
        token_ids = [samples[number].token_ids[where].tolist() for number, where in drawn]
        return self.probe + self._everywhere(token_ids)

    async def _score(
        self,
        sequences: Sequence[Sequence[int]],
        version: int | None,
        engines: Sequence[int] | None = None,
    ) -> dict[int, tuple[list[np.ndarray], list[np.ndarray]]]:
        """Logprobs by each engine, and by the trainer with that engine's routes; engines whose
        routes are equal share what the trainer gives."""
        found = await self.engines.score(sequences, version, engines)
        trainer: dict[str, list[np.ndarray]] = {}
        pairs = {}
        for one in found:
            routes, key = (one.routes, one.checksum) if self._replayed(one) else (None, "")
            if key not in trainer:
                adapters = version is not None
                trainer[key] = await self.trainer.score(sequences, routes, adapters)
            pairs[one.engine] = one.logprobs, trainer[key]
        return pairs

    def _replayed(self, scored: Scored) -> bool:
        """Whether the trainer scores with an engine's routes: two routers near a tie would make two
        policies of one. When some are missing it does so under replay.mode=r3 alone, which needs
        them for training too (replay.missing says what becomes of the rest); otherwise it chooses
        by itself, as it does in training."""
        return scored.complete or self.config.replay.mode == "r3"


def _differ(names: Sequence[str]) -> str:
    return f"engines hold something else than was sent in {', '.join(names)}"
