"""`lora-moe-rl verify async`: tokens sampled while versions are published, scored again.

trainer rank ──> adapters ──published while it samples──> engine ──> samples, versions, routes
                    └───────one at a time───────────────> another engine ──> logprobs
trainer rank at each of them, with the samples' routes ────────────────────> logprobs
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.run.publisher import plan_layouts
from lora_moe_rl.verify import in_flight_jobs
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.in_flight_engine import InFlightEngine
from lora_moe_rl.verify.inputs import random_adapter
from lora_moe_rl.verify.ranks import Ranks
from lora_moe_rl.verify.report import Check, Say

WAYS = ("finish", "join", "split")
PUBLISHED = 3  # versions, each while requests of the one before are in flight
PROMPT = 12  # tokens
ALL = slice(None)
EFFECT = 100  # versions must be apart by so many tolerances
AT_ONCE_S = 0.05
PARTS = (1.0, 0.7, 1.4, 0.85, 1.2, 0.5, 1.6, 1.0)  # of the time between two versions


@dataclass
class Sampled:
    """What was sampled in one way. `versions`: the number of each adapter there."""

    samples: list[Sample]
    table: RouteTable
    versions: list[int]

    def apart(self, by_adapter: Sequence[Sequence[np.ndarray]], among: slice = ALL) -> float:
        """The largest |difference| of a token to what the adapter of its version gives it, of those
        of the versions `among` all; NaN where there is one, or no token. `by_adapter`: logprobs [R]
        of each sample."""
        found = [
            np.abs(sample.logprobs - by_adapter[adapter][number])[sample.versions == version]
            for number, sample in enumerate(self.samples)
            for adapter, version in list(enumerate(self.versions))[among]
        ]
        every = np.concatenate(found)
        return float(every.max()) if len(every) else math.nan

    @property
    def continued(self) -> int:
        return sum(len(np.unique(sample.versions)) > 1 for sample in self.samples)

    @property
    def unknown(self) -> int:
        """Tokens of a version that was not published."""
        return sum(int((~np.isin(one.versions, self.versions)).sum()) for one in self.samples)


@dataclass
class Verification:
    """One run of the command."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    num_samples: int
    timeout_s: float
    tolerance: float
    say: Say
    versions: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> list[Check]:
        first = self.config.seed + 1
        self.adapters = [random_adapter(self.spec, first + i) for i in range(PUBLISHED)]
        self.layouts = plan_layouts(self.config, self.spec, "float32")
        self.say("starting a trainer rank and an engine")
        life_s = 10 * self.timeout_s
        with (
            tempfile.TemporaryDirectory(prefix="lora-moe-rl-verify-") as folder,
            Ranks(self.config, self.model_dir, False, life_s) as self.ranks,
        ):
            found = self._sampled(Path(folder))
            alone = self._scored_alone(Path(folder), found)
            return [check for way in WAYS for check in self._checks(way, found[way], alone[way])]

    def _engine(self, folder: Path, name: str, slots: int) -> EngineProcess:
        config = with_settings(self.config, {"refit": {"slots": slots}})
        log = folder / f"{name}.log"
        return EngineProcess(config, self.spec, self.model_dir, log, InFlightEngine)

    def _send(self, adapter: int) -> tuple[int, list[SentPart]]:
        """An adapter as a version of its own, ready to be published."""
        version = next(self.versions)
        tensors = self.adapters[adapter]
        return version, self.ranks.run(
            in_flight_jobs.send, tensors, version, self.layouts, SHARED_MEMORY
        )

    def _sampled(self, folder: Path) -> dict[str, Sampled]:
        """In each way. The first, in which no request is ended, says how long they take; where by
        chance none was in flight when a version came, they are asked again, and it comes at another
        time."""
        size, draw = (self.num_samples, PROMPT), np.random.default_rng(self.config.seed)
        prompts = draw.integers(0, self.spec.shape.vocab_size, size).tolist()
        found, every_s = {}, AT_ONCE_S
        with self._engine(folder, "sampling", PUBLISHED + 1) as engine:
            engine.start()
            engine.ask("prepare_refit", self.layouts)
            for way in WAYS:
                self.say(f"sampling: {way}")
                for part in PARTS:
                    sent = [self._send(adapter) for adapter in range(PUBLISHED)]
                    arguments = (prompts, self.config.seed, sent, part * every_s, way)
                    answer = engine.ask("sample_across", *arguments, timeout_s=self.timeout_s)
                    samples, table, seconds = answer
                    found[way] = Sampled(samples, table, [version for version, _ in sent])
                    if way == "finish":
                        every_s = seconds / (PUBLISHED + 1)
                    if way == "finish" or found[way].continued:
                        break
        return found

    def _scored_alone(self, folder: Path, found: dict[str, Sampled]) -> dict[str, list]:
        """The logprobs [R] of the samples of each way, by each adapter."""
        alone: dict[str, list] = {way: [] for way in WAYS}
        with self._engine(folder, "alone", 1) as engine:
            engine.start()
            engine.ask("prepare_refit", self.layouts)
            self.say("scoring, one version at a time")
            for adapter in range(PUBLISHED):
                version, sent = self._send(adapter)
                engine.ask("publish", version, *sent)
                for way, sampled in found.items():
                    sequences = [one.token_ids.tolist() for one in sampled.samples]
                    scores, _ = engine.ask("score", sequences, version, timeout_s=self.timeout_s)
                    pairs = zip(scores, sampled.samples, strict=True)
                    alone[way].append([s[len(one.prompt_ids) - 1 :] for s, one in pairs])
        return alone

    def _checks(self, way: str, sampled: Sampled, alone: list) -> Iterator[Check]:
        self.say(f"the trainer: {way}")
        nothing = [np.zeros(len(one.mask), np.float32) for one in sampled.samples]
        weights = [one + 1 for one in nothing]
        batch = TrainBatch.from_samples(sampled.samples, nothing, weights, step=0)
        (trainer,) = self.ranks.run(in_flight_jobs.score, self.adapters, batch, sampled.table)
        effect = EFFECT * self.tolerance
        yield Check(f"{way}: tokens of a version that was not published", sampled.unknown, 0)
        yield Check(f"{way}: an engine of that version alone", sampled.apart(alone), self.tolerance)
        other = [*alone[1:], alone[0]]
        yield Check(f"{way}: another version", sampled.apart(other), effect, at_least=True)
        goes_on = way != "finish"
        count = sampled.continued
        yield Check(f"{way}: samples that go on", count, int(goes_on), at_least=goes_on)
        exact = slice(0, 1) if way == "join" else ALL
        yield Check(f"{way}: the trainer", sampled.apart(trainer, exact), self.tolerance)
        if way == "join":  # what split is for: a figure, of which only NaN is wrong
            rest = sampled.apart(trainer, slice(1, None))
            yield Check(f"{way}: the trainer, of what goes on", rest, 0, at_least=True)
