"""One evaluation of a run that learns from its rows' own answers: how likely the held-out rows'
answers are to the trainer's adapter. No engine is asked, and nothing is sampled."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from lora_moe_rl.algorithms.base import Algorithm
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.evaluation import EVAL
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.errors import NonFiniteError
from lora_moe_rl.evaluation.answers_loss import Judged, set_metrics
from lora_moe_rl.ports import Trainer
from lora_moe_rl.run.offline import NoPolicy
from lora_moe_rl.telemetry import console, names
from lora_moe_rl.telemetry.metrics import MetricsWriter
from lora_moe_rl.telemetry.timeline import EVALUATE, TRAINER, Timeline


class AnswersEvaluator:
    """`held_out`: the rows of every set, by its name `eval/NAME`."""

    def __init__(
        self,
        config: RunConfig,
        held_out: Mapping[str, Sequence[Prompt]],
        environment: Environment,
        algorithm: Algorithm,
        trainer: Trainer,
        timeline: Timeline,
        metrics: MetricsWriter,
    ):
        self.config, self.held_out, self.environment = config, held_out, environment
        self.algorithm, self.trainer = algorithm, trainer
        self.timeline, self.metrics = timeline, metrics
        self.sets = config.eval.sources()

    async def evaluate(self, step: int, version: int) -> None:
        """Judges all sets under the adapter that the ranks hold, which is `version`, and writes the
        metrics: an evaluation is on record whole or not at all. Raises NonFiniteError for a logprob
        that is no number."""
        started = time.perf_counter()
        found: dict[str, float] = {}
        with self.timeline.span(TRAINER, EVALUATE, step):
            for name, prompts in self.held_out.items():
                rows = await self._judged(prompts)
                own = name.removeprefix(EVAL)
                found |= set_metrics(own, self.sets[name], self.algorithm, rows)
                _check_finite(own, rows, step)
        record = {
            "step": step,
            names.EVAL_STEP: step,
            names.EVAL_VERSION: version,
            names.EVAL_SECONDS: time.perf_counter() - started,
            **found,
        }
        self.metrics.write(record)
        console.show_held_out(record, self.config.eval)

    async def _judged(self, prompts: Sequence[Prompt]) -> list[Judged]:
        """The rows judged, as many at a time as a step has."""
        size, found = self.config.algorithm.prompts_per_step, []
        for begin in range(0, len(prompts), size):
            some = prompts[begin : begin + size]
            groups = [await self.environment.rollout(prompt, NoPolicy()) for prompt in some]
            found += await self._of(groups)
        return found

    async def _of(self, groups: Sequence[Group]) -> list[Judged]:
        signals = signals_of(self.algorithm, groups)
        share = self.config.trainer.shares_prompts
        batch = TrainBatch.from_groups(groups, signals, 1, step=0, share_prompts=share)
        logprobs = await self.trainer.judge(batch)
        policy, reference = iter(logprobs["old"]), logprobs.get("reference")
        against = iter(reference or ())
        return [
            Judged(
                group,
                [next(policy) for _ in group.samples],
                None if reference is None else [next(against) for _ in group.samples],
            )
            for group in groups
        ]


def _check_finite(name: str, rows: Sequence[Judged], step: int) -> None:
    """A metric that is not finite may be one of large numbers; a logprob never is."""
    for row in rows:
        for one in (*row.policy, *(row.reference or ())):
            if not np.isfinite(one).all():
                raise NonFiniteError(
                    f"after step {step} a logprob of row {row.group.prompt.number} of eval.sets."
                    f"{name} is not finite: the adapter is broken, or the base is; go on from an "
                    "older checkpoint with --resume-from"
                )
