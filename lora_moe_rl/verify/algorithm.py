"""`lora-moe-rl verify algorithm`: on the user's model an algorithm's loss and gradient do not
depend on micro-batches and layouts, and equal a plain reference in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.algorithms.parts.settings import PolicyGradientConfig
from lora_moe_rl.config import AlgorithmConfig, RunConfig, TrainerConfig
from lora_moe_rl.config.options import names, positive, verify_parser
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.config.plugins import ALGORITHMS, PARTS
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models import quantised
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.verify import algorithm_jobs as jobs
from lora_moe_rl.verify import report
from lora_moe_rl.verify.inputs import random_batch
from lora_moe_rl.verify.layouts import Layout, chosen, parse_layouts, placed, read_config
from lora_moe_rl.verify.ranks import run_ranks, spec_of
from lora_moe_rl.verify.report import Check, Say, progress

ABOUT = """\
For each algorithm, the loss and the gradient of one step with random adapters, samples and replayed
routes (a base or start that it is measured against routes by itself; a teacher's likeliest tokens
are random too): of a plain reference that takes the whole step at once in float64, of one rank with
one micro-batch, of one rank with many, and of each layout. Every algorithm comes as it is set and,
where it has a ratio, with algorithm.anchor=rollout, since a ratio to the trainer's own logprobs is
1 in a step's first update. Of one that learns from pairs (dpo) the loss is the sum of products that
has its gradient. That the formulas are the published ones is shown by the project's tests, against
verl's and TRL's numbers.
Exit code 1 when anything is wrong.

Settings are algorithm.* (for all of them), adapter.*, trainer.device, trainer.dtype and seed.
"""
SETTINGS = ("algorithm.*", "adapter.*", "trainer.device", "trainer.dtype", "seed")
LAYOUTS = "dp2,tp2"
BASE = {"trainer": {"dtype": "float32", "micro_batch_tokens": 1 << 16}}
MICRO_BATCH_TOKENS = 48  # a few samples
SAMPLES_PER_GROUP = 3
ANY_RUN = RunConfig(trainer=TrainerConfig(steps=10_000))  # longer than any warm-up
# Of the loss |difference| / max(1, |loss|), of the gradient ||difference|| / ||gradient||.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
ONE = "one micro-batch"
MANY = "micro-batches"


@dataclass
class Row:
    """One algorithm: its largest error by who computed it."""

    name: str
    loss: float
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def faults(self) -> Iterator[str]:
        for check in self.checks:
            if not check.passed:
                yield f"{check.quantity}: {'; '.join(check.faults)}"


@dataclass
class Report(report.Report):
    model: str
    samples: int
    rows: list[Row]
    seconds: float

    def parts(self) -> Iterator[Any]:
        yield (
            f"{self.model}: {self.samples} samples, {self.seconds:.0f} s; the larger error of loss "
            f"and gradient against float64 on the whole step, allowed {self._tolerance:.0e}:"
        )
        quantities = [check.quantity for check in self.rows[0].checks]
        table = report.table(["", "loss", *quantities, ""], left=(0, -1))
        for row in self.rows:
            cells = (report.number(check.error) for check in row.checks)
            table.add_row(row.name, f"{row.loss:+.5f}", *cells, report.verdict(row.passed))
        yield table

    @property
    def _tolerance(self) -> float:
        return self.rows[0].checks[0].tolerance

    def figures(self) -> dict[str, Any]:
        rows = [
            {
                "name": row.name,
                "loss": row.loss,
                "passed": row.passed,
                "errors": {check.quantity: check.error for check in row.checks},
                "faults": list(row.faults()),
            }
            for row in self.rows
        ]
        head = {"model": self.model, "samples": self.samples, "tolerance": self._tolerance}
        return head | {"seconds": round(self.seconds, 1), "passed": self.passed, "rows": rows}


@dataclass
class Verification:
    """One run of the command. `cases`: a config with each algorithm, by its row's name."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    layouts: list[Layout]
    cases: dict[str, RunConfig]
    samples: int = 24
    say: Say = lambda text: None

    def run(self) -> Report:
        started = time.perf_counter()
        batch, table = random_batch(self.spec, self.samples, self.config.seed + 1)
        batch.groups = np.arange(self.samples) // SAMPLES_PER_GROUP
        batch.rewards = np.random.default_rng(self.config.seed).uniform(0, 1, self.samples)
        inputs = jobs.Inputs(batch, table, self.cases)
        self.say("what an engine might have sampled with")
        (batch.logprobs,) = self._ranks(self.config, jobs.near_rollout, inputs)
        self.say("the reference, in float64")
        wanted = self._whole(self._ranks(self.config, jobs.reference, inputs))
        rows = {name: Row(name, loss) for name, (loss, _) in wanted.items()}
        for name, config in self._configs():
            self.say(name)
            found = self._whole(self._ranks(config, jobs.every_case, inputs))
            for case, row in rows.items():
                row.checks.append(compare(name, found[case], wanted[case], self.tolerance))
        seconds = time.perf_counter() - started
        return Report(self.config.model.path, self.samples, list(rows.values()), seconds)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.config.trainer.dtype]

    def _configs(self) -> Iterator[tuple[str, RunConfig]]:
        yield ONE, self.config
        small = {"trainer": {"micro_batch_tokens": MICRO_BATCH_TOKENS}}
        yield MANY, with_settings(self.config, small)
        for layout in self.layouts:
            yield layout.name, with_settings(layout.config, small)

    def _ranks(self, config: RunConfig, job, inputs: jobs.Inputs) -> list[Any]:
        cuda = config.trainer.device == "cuda"
        return run_ranks(config, self.model_dir, job, inputs, cuda=cuda, timeout_s=600)

    def _whole(self, ranks: list[dict[str, jobs.Found]]) -> dict[str, tuple[float, dict]]:
        """The loss and the gradient of every case, from the parts of all ranks."""
        found = {}
        for case in self.cases:
            shards = [shard for rank in ranks for shard in rank[case][1]]
            found[case] = ranks[0][case][0], assemble(self.spec.tensor_shapes, shards)
        return found


def compare(
    name: str,
    found: tuple[float, dict[str, np.ndarray]],
    wanted: tuple[float, dict[str, np.ndarray]],
    tolerance: float,
) -> Check:
    """The larger error of loss and gradient. A gradient that is 0 everywhere fails: it shows
    nothing."""
    (loss, gradient), (true, whole) = found, wanted
    off = abs(loss - true) / max(1.0, abs(true))
    size = np.sqrt(sum(float((tensor.astype(np.float64) ** 2).sum()) for tensor in whole.values()))
    apart = np.sqrt(
        sum(float(((gradient[key] - whole[key]).astype(np.float64) ** 2).sum()) for key in whole)
    )
    error = float(apart / size) if size > 0 else float("nan")
    faults = []
    if not off <= tolerance:
        faults.append(f"the loss is {loss:.7g}, not {true:.7g}")
    if not error <= tolerance:
        faults.append(
            f"the gradient is off by {error:.1e} of its size" if size else "no token has a gradient"
        )
    worst = off if np.isnan(off) or np.isnan(error) else max(off, error)
    return Check(name, float("nan") if faults and np.isnan(error) else worst, tolerance, faults)


def cases_of(config: RunConfig, wanted: Sequence[str]) -> dict[str, RunConfig]:
    """Each algorithm with the settings of `config.algorithm` that were given, and once more with
    its ratio taken to the rollout. Raises ConfigError for one that is not there or a setting that
    it does not have."""
    given = config.algorithm.model_dump(exclude_unset=True, exclude={"name"})
    cases = {}
    for name in wanted:
        section = {"name": name, **given}
        cases[name] = with_settings(ANY_RUN, {"algorithm": section})
        if _has_ratio_to_trainer(cases[name].algorithm):
            at_rollout = {"algorithm": section | {"anchor": "rollout"}}
            cases[f"{name}, anchor=rollout"] = with_settings(ANY_RUN, at_rollout)
    return cases


def _has_ratio_to_trainer(settings: AlgorithmConfig) -> bool:
    """Whether it has one that could be to the rollout as well."""
    if not isinstance(settings, PolicyGradientConfig) or settings.anchor == "rollout":
        return False
    return PARTS["loss"].find(settings.loss).has_ratio


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    config = read_config("verify algorithm", options.model, options.settings, SETTINGS, BASE)
    wanted = names(options.algorithms, "--algorithms", "an algorithm")
    cases = cases_of(config, wanted)
    paired = [name for name, case in cases.items() if case.learns_from == "pairs"]
    if paired and options.samples % 2:
        raise ConfigError(
            f"--samples {options.samples} leaves one without a pair, and {paired[0]} learns from "
            f"pairs; take {options.samples + 1}"
        )
    model_dir = resolve_model(config.model.path, config.model.revision)
    spec = spec_of(model_dir, config)
    form, whole = quantised.form_in(model_dir), config

    def parse(wanted: list[str]) -> list[Layout]:
        return parse_layouts(wanted, whole, spec.shape, form)

    found = placed(chosen(options.layouts, LAYOUTS, parse, "--layouts"))
    trainer = found[0].config.trainer
    alone = {"trainer": {"device": trainer.device, "dtype": trainer.dtype}}
    config = with_settings(config, alone)
    with progress(len(found) + 4, options.json) as say:
        report = Verification(config, spec, model_dir, found, cases, options.samples, say).run()
    return report.conclude(options.json)


def _parser():
    parser = verify_parser("algorithm", ABOUT)
    parser.add_argument(
        "--algorithms",
        default=",".join(ALGORITHMS.names()),
        help="names or file.py:Class, with commas (all presets)",
    )
    parser.add_argument(
        "--layouts", help=f"as tp2ep2, with commas (those of {LAYOUTS} that can be)"
    )
    parser.add_argument("--samples", type=positive, default=24, help="of the step (24)")
    return parser
