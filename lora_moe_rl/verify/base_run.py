"""`lora-moe-rl verify base`: a quantised base in engine and trainer, and as plain numbers.

trainer rank ──> adapter ──> engine ──> samples, logprobs, routes ──> the rank's logprobs
                                             │
                                             ├──> a rank on the packed base    logprobs, gradients
                                             └──> a rank on the base as numbers  the same
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.algorithms.parts import kl
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.export.merged import dequantise
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.run.publisher import plan_layouts
from lora_moe_rl.verify import base_jobs, in_flight_jobs
from lora_moe_rl.verify.compare import gradient_errors
from lora_moe_rl.verify.comparisons import largest
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.in_flight_engine import InFlightEngine
from lora_moe_rl.verify.inputs import random_adapter
from lora_moe_rl.verify.ranks import Ranks, run_ranks
from lora_moe_rl.verify.report import Check, Say

PROMPT = 12  # tokens
# By trainer.fp8_forward: what rounding may come to. Activations in 8 bits turn the last bit of a
# float32 into a step of e4m3 where it falls between two.
LOGPROBS = {"dequantise": 1e-5, "engine": 5e-2}
KL = {"dequantise": 1e-6, "engine": 1e-4}
NUMBERS = 1e-6  # logprobs, and gradients relative to a tensor's, against the model as numbers
LESS = 3  # how often the KL without quantised activations must be that with them
EFFECT = 0.1  # the adapter must change a token's logprob by so much
VERSION = 1

Outcome = tuple[list[np.ndarray], dict[str, np.ndarray]]  # logprobs, whole gradients


@dataclass
class Verification:
    """One run of the command. `served`: what the engine loads and is written out as numbers, where
    it is not `model_dir`: a fault, to see that it is noticed."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    num_samples: int
    timeout_s: float
    say: Say
    served: Path | None = None

    def run(self) -> list[Check]:
        self.adapter = random_adapter(self.spec, self.config.seed + 1)
        with tempfile.TemporaryDirectory(prefix="lora-moe-rl-verify-") as folder:
            self.folder = Path(folder)
            batch, table, ours, without = self._sampled()
            self.say("a rank on the packed base")
            packed = self._rank(self.model_dir, batch, table)
            self.say("a rank on the base as numbers")
            dequantise(self.served or self.model_dir, numbers := self.folder / "numbers", "float32")
            plain = self._rank(numbers, batch, table)
        return [*self._engine(batch, ours, without, packed[0]), *_numbers(packed, plain)]

    def _sampled(self) -> tuple[TrainBatch, RouteTable, list[np.ndarray], list[np.ndarray]]:
        """Samples of an engine under the adapter, their routes, and the trainer's logprobs of them
        with the adapter and without."""
        self.say("starting a trainer rank and an engine")
        layouts = plan_layouts(self.config, self.spec, "float32")
        nothing = {name: np.zeros_like(tensor) for name, tensor in self.adapter.items()}
        served = self.served or self.model_dir
        log = self.folder / "engine.log"
        with (
            Ranks(self.config, self.model_dir, False, 3 * self.timeout_s) as ranks,
            EngineProcess(self.config, self.spec, served, log, InFlightEngine) as engine,
        ):
            engine.start()
            engine.ask("prepare_refit", layouts)
            sent = ranks.run(in_flight_jobs.send, self.adapter, VERSION, layouts, SHARED_MEMORY)
            self.say("sampling, and scoring by the trainer")
            arguments = (self._prompts(), self.config.seed, [(VERSION, sent)], 0.0, "finish")
            samples, table, _ = engine.ask("sample_across", *arguments, timeout_s=self.timeout_s)
            draw = np.random.default_rng(self.config.seed)
            worth = [np.full(len(one.mask), draw.normal(), np.float32) for one in samples]
            weights = [np.ones(len(one.mask), np.float32) for one in samples]
            batch = TrainBatch.from_samples(samples, worth, weights, step=0)
            (found,) = ranks.run(in_flight_jobs.score, [self.adapter, nothing], batch, table)
        return batch, table, *found

    def _prompts(self) -> list[list[int]]:
        size = (self.num_samples, PROMPT)
        draw = np.random.default_rng(self.config.seed)
        return draw.integers(0, self.spec.shape.vocab_size, size).tolist()

    def _engine(self, batch: TrainBatch, ours, without, as_they_are) -> Iterator[Check]:
        """The trainer against the engine that sampled. `as_they_are`: the trainer's logprobs where
        activations are not quantised."""
        forward, theirs = self.config.trainer.fp8_forward, batch.logprobs
        yield Check("engine, largest |Δlogprob|", largest(ours, theirs), LOGPROBS[forward])
        found = _kl(theirs, ours)
        yield Check("engine, mismatch/kl", found, KL[forward])
        if forward == "engine":
            name = "engine, mismatch/kl with activations as they are"
            yield Check(name, _kl(theirs, as_they_are), LESS * found, at_least=True)
        effect = largest(without, theirs)
        yield Check("engine, largest |Δlogprob| without the adapter", effect, EFFECT, at_least=True)

    def _rank(self, model_dir: Path, batch: TrainBatch, table: RouteTable) -> Outcome:
        """What one rank finds on a base."""
        config = with_settings(self.config, {"trainer": {"fp8_forward": "dequantise"}})
        job = (base_jobs.logprobs_and_gradients, self.adapter, batch, table)
        ((logprobs, shards),) = run_ranks(config, model_dir, *job, timeout_s=self.timeout_s)
        return logprobs, assemble(self.spec.tensor_shapes, shards)


def _kl(rollout: Sequence[np.ndarray], trainer: Sequence[np.ndarray]) -> float:
    both = np.concatenate(rollout), np.concatenate(trainer)
    return kl.mismatch(*both, np.ones(len(both[0]), bool))["kl"]


def _numbers(packed: Outcome, plain: Outcome) -> Iterator[Check]:
    """The packed base against the same as numbers, both with activations as they are."""
    (logprobs, gradients), (expected, by_numbers) = packed, plain
    yield Check("numbers, largest |Δlogprob|", largest(logprobs, expected), NUMBERS)
    errors = gradient_errors(gradients, by_numbers)
    yield Check("numbers, a tensor's gradient", float(np.max([*errors.values()])), NUMBERS)
