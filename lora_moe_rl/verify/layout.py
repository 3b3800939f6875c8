"""`lora-moe-rl verify layout`: each layout against one rank, and one rank against Hugging Face.

one rank ──> adapter, outcome, checkpoint ──> Hugging Face: logprobs of the merged weights
                     │
                     ├──> each layout: the same adapter, samples and routes -> its outcome
                     │
one rank <── the checkpoints of all layouts
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.models import quantised
from lora_moe_rl.verify import jobs
from lora_moe_rl.verify.compare import TOLERANCES, checkpoint_check, compare, tolerances
from lora_moe_rl.verify.comparisons import largest_scaled, left_of
from lora_moe_rl.verify.inputs import random_batch
from lora_moe_rl.verify.jobs import Inputs, Outcome, gather
from lora_moe_rl.verify.layout_report import Report, Row
from lora_moe_rl.verify.layouts import Layout, chosen, parse_layouts, placed, read_config
from lora_moe_rl.verify.processes import run_processes
from lora_moe_rl.verify.ranks import run_ranks, spec_of
from lora_moe_rl.verify.report import Check, Say, timed

DEFAULT_LAYOUTS = "tp2,pp2,ep2,tp2ep2,etp2tp2,pp2ep2,tp2pp2ep2"
SETTINGS = ("adapter.*", "trainer.device", "trainer.dtype", "seed")
LENGTHS = (4, 9)
# Of the adapter's effect on logprobs at most so much may be missing. Without it all is (1); in
# bfloat16 the tiny models come to 0.16 and 0.23.
LEFT = 0.5
# Small micro-batches, so that every rank has several of uneven size. The loss has a KL term, since
# on-policy the value of the rest does not depend on the model. A trained model gives random tokens
# logits of +-20, whose rounding drowns small gradients: hence the temperature, the short sequences
# and advantages of one sign, whose gradients add up.
BASE = {
    "model": {"max_length": 32},
    "trainer": {"dtype": "float32", "lr": 1e-3, "micro_batch_tokens": 64, "clip_grad": 0.1},
    "rollout": {"temperature": 4.0},
    "algorithm": {"kl_coef": 0.1},
}


def make_config(model: str, settings: Sequence[str] = ()) -> RunConfig:
    """Raises ConfigError for a setting that this command does not read."""
    return read_config("verify layout", model, settings, SETTINGS, BASE)


def plan(config: RunConfig, named: str | None, model_dir: Path) -> tuple[AdapterSpec, list[Layout]]:
    """All that can be refused before anything starts. Raises ConfigError or ModelError."""
    spec = spec_of(model_dir, config)
    form = quantised.form_in(model_dir)

    def parse(wanted: list[str]) -> list[Layout]:
        return parse_layouts(wanted, config, spec.shape, form)

    return spec, placed(chosen(named, DEFAULT_LAYOUTS, parse, "--layouts"))


@dataclass
class Verification:
    """One run of the command. `dropped`: entries of the sharding table that no rank sums over, to
    see that it is noticed."""

    spec: AdapterSpec
    model_dir: Path
    layouts: list[Layout]
    samples: int = 32
    timeout_s: float = 600
    tolerance: float | None = None
    dropped: tuple[tuple, ...] = ()
    say: Say = lambda text: None

    def __post_init__(self):
        trainer = self.layouts[0].config.trainer
        self.cuda = trainer.device == "cuda"
        self.tolerances = TOLERANCES[trainer.device, trainer.dtype]
        if self.tolerance is not None:
            self.tolerances = tolerances(self.tolerance, self.tolerances["adapter"])
        alone = {"world_size": 1} | dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "vpp"), 1)
        self.alone = with_settings(self.layouts[0].config, {"trainer": alone})

    def run(self) -> Report:
        started = time.perf_counter()
        trainer = self.alone.trainer
        batch, table = random_batch(self.spec, self.samples, self.alone.seed + 1, LENGTHS)
        batch.advantages = [np.abs(one) for one in batch.advantages]
        with tempfile.TemporaryDirectory(prefix="lora-moe-rl-verify-") as folder:
            inputs = Inputs(batch, table, _made(Path(folder) / "one"))
            one, reference = self._one_rank(inputs)
            inputs = replace(
                inputs,
                adapter=one.adapter,
                other=(inputs.directory, one.meta),
                dropped=self.dropped,
            )
            rows, outcomes = [], []
            for layout in self.layouts:
                self.say(f"{layout.name} ({layout.world_size} ranks)")
                mine = replace(inputs, directory=_made(Path(folder) / layout.name))
                row, outcome = self._layout(layout, mine, one)
                rows.append(row)
                outcomes.append((mine.directory, outcome))
            self.say("reading the checkpoints of all layouts")
            self._checkpoints(rows, outcomes, one)
        return Report(
            model=self.alone.model.path,
            device=trainer.device,
            dtype=trainer.dtype,
            samples=self.samples,
            rows=[reference, *rows],
            seconds=time.perf_counter() - started,
        )

    def _ranks(self, config: RunConfig, job, *args):
        return run_ranks(
            config, self.model_dir, job, *args, cuda=self.cuda, timeout_s=self.timeout_s
        )

    def _one_rank(self, inputs: Inputs) -> tuple[Outcome, Row]:
        """Raises what stops it: without one rank there is nothing to compare with."""
        self.say("one rank")
        one = gather(self.spec, self._ranks(self.alone, jobs.compute, inputs))
        if one.failure is not None:
            raise one.failure
        self.say("Hugging Face, with the adapter merged by hand")
        row = Row("Hugging Face", 1, quantities=("logprobs", "adapter's effect"))
        with timed(row):
            arguments = (self.model_dir, self.spec, one.adapter, inputs.sequences)
            ((merged, base),) = run_processes(
                1, jobs.hugging_face, *arguments, timeout_s=self.timeout_s
            )
            ours = one.own_logprobs or []
            error, limit = largest_scaled(ours, merged), self.tolerances["Hugging Face"]
            row.checks.append(Check("logprobs", error, limit))
            # The limit of bfloat16 is above what an adapter changes of many a model.
            row.checks.append(Check("adapter's effect", left_of(ours, merged, base), LEFT))
        return one, row

    def _layout(self, layout: Layout, inputs: Inputs, one: Outcome) -> tuple[Row, Outcome | None]:
        row, outcome = Row(layout.name, layout.world_size), None
        with timed(row):
            outcome = gather(self.spec, self._ranks(layout.config, jobs.compute, inputs))
            row.checks = compare(self.spec, layout.sizes(), outcome, one, self.tolerances)
            if outcome.failure is not None:
                row.failure = str(outcome.failure)
        return row, outcome

    def _checkpoints(
        self, rows: list[Row], outcomes: list[tuple[Path, Outcome | None]], one: Outcome
    ) -> None:
        """Adds the last check of each layout that saved one."""
        saved = {i: (d, x) for i, (d, x) in enumerate(outcomes) if x is not None and x.meta}
        wanted = [(directory, outcome.meta) for directory, outcome in saved.values()]
        if not wanted:
            return
        try:
            (parts,) = self._ranks(self.alone, jobs.load_all, wanted)
            loaded = [gather(self.spec, [part]) for part in parts]
        except LoraMoeRlError as error:
            for i in saved:
                rows[i].failure = rows[i].failure or str(error)
            return
        for by_one, (i, (_, outcome)) in zip(loaded, saved.items(), strict=True):
            pairs = [(by_one, outcome), (outcome, one)]
            check = checkpoint_check(self.spec, self.layouts[i].sizes(), pairs)
            rows[i].checks.append(check)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
