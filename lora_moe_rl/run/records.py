"""What the run keeps of each step: metrics, samples, checkpoints; and when it has to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.algorithms.parts.settings import PolicyGradientConfig
from lora_moe_rl.config import AlgorithmConfig, RunConfig
from lora_moe_rl.data.samples import Group, Sample
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import NonFiniteError, NothingTrainedError, RewardError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.ports import Trainer
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.run import plateau
from lora_moe_rl.run.checkpoints import Checkpoints
from lora_moe_rl.run.health import Health
from lora_moe_rl.run.mismatch import MismatchBounds
from lora_moe_rl.run.performance import Performance
from lora_moe_rl.run.plateau import Plateau
from lora_moe_rl.run.reward_metrics import reward_metrics, reweight_metrics
from lora_moe_rl.run.sample_metrics import (
    age_metrics,
    continued_metrics,
    data_metrics,
    draft_metrics,
    environment_metrics,
    rollout_metrics,
)
from lora_moe_rl.telemetry import console, details, expert_loads, names
from lora_moe_rl.telemetry.clock import Clock
from lora_moe_rl.telemetry.metrics import MetricsWriter


@dataclass(frozen=True)
class StepFacts:
    """A step that was trained and served. `version` is the one that it updated, `published` the
    publisher's metrics; so far `restarts` of engines, and groups that were `stale`."""

    step: int
    groups: Sequence[Group]
    signals: Sequence[Signal]
    result: UpdateResult
    version: int
    published: dict[str, float]
    restarts: int
    stale: int

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]


class Records:
    """`done` is the last step that is on record; `dtype` the trainer's. `written` is called with
    each checkpoint and the adapter beside it, once they are there."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        trainer: Trainer,
        metrics: MetricsWriter,
        done: int,
        dtype: Dtype,
        written: Callable[[Path, Path], None] = lambda checkpoint, adapter: None,
    ):
        self.config, self.spec, self.run_dir, self.metrics = config, spec, run_dir, metrics
        self._mismatch = MismatchBounds(config, run_dir, dtype)
        parts = (config, spec, model_dir, run_dir, trainer)
        self.checkpoints = Checkpoints(*parts, self._adapter_written, written, newest=done)
        self.stop_requested = False
        self.plateau: Plateau | None = None  # what ended the run before its last step
        self.done = done
        self._lines = console.StepLines(config)
        greedy = algorithms.make(config).greedy_baseline
        self._health = Health(config.algorithm.equal_within, greedy)
        self._skipped_in_a_row = 0
        self._unrewarded_in_a_row = 0
        self._untrained_in_a_row = 0
        self._drawn_again = self._stayed = 0  # groups since the last record
        self._bar: console.Bar | None = None
        self.performance: Performance | None = None  # start.py gives it
        # The newest step that is copied elsewhere; start.py gives it, with checkpoint.push_to.
        self.copied: Callable[[], int] | None = None

    @contextmanager
    def progress(self) -> Iterator[None]:
        """A bar of the samples that a step waits for."""
        algorithm = self.config.algorithm
        with console.progress(
            algorithm.prompts_per_step * algorithm.group_size, self.config
        ) as bar:
            self._bar = bar
            yield
        self._bar = None

    def rolled(self, num_samples: int) -> None:
        """Takes note of a group that stays."""
        self._stayed += 1
        if self._bar is not None:
            self._bar(num_samples)

    def drawn_again(self, group: Group) -> None:
        """Counts a group that is replaced by another prompt's. Raises RewardError when a step finds
        too few that have a signal. With lag several steps are filled at once, and between two
        records, each of which may replace so many."""
        self._drawn_again += 1
        algorithm = self.config.algorithm
        steps = self._stayed // algorithm.prompts_per_step + 1 + self.config.schedule.lag
        limit = algorithm.draw_again * algorithm.prompts_per_step * steps
        if self._drawn_again > limit:
            rewards = group.rewards[~np.isnan(group.rewards)]
            last = f"all {rewards[0]:g}" if rewards.size else "none at all"
            of = f"{steps} steps" if steps > 1 else "one step"
            why = "samples with equal rewards"
            if group.taught is not None:
                why = "no sample that its teacher could read more of; rewards"
            raise RewardError(
                f"{self._drawn_again} prompts of {of} had {why} (the "
                f"last: {last}), more than algorithm.draw_again={algorithm.draw_again} times "
                f"prompts_per_step={algorithm.prompts_per_step} allow; the prompts are too easy or "
                "too hard, or the reward does not tell samples apart: raise algorithm.draw_again, "
                "or take other prompts or another reward"
            )

    def check_rewards(self, groups: Sequence[Group]) -> None:
        """Raises RewardError when too many rewards of a step have failed, or when no sample has had
        one in too many steps in a row. Rows' own answers have none to fail."""
        if self.config.offline:
            return
        failures = [failure for group in groups for failure in group.failures]
        total = sum(len(group.ends) for group in groups)
        if len(failures) > self.config.reward.max_failed * total:
            raise RewardError(
                f"step {self.done + 1}: {len(failures)} of {total} rewards failed, more than "
                f"reward.max_failed={self.config.reward.max_failed:g} allows; the first: "
                f"{failures[0]}"
            )
        none = all(np.isnan(group.rewards).all() for group in groups)
        self._unrewarded_in_a_row = self._unrewarded_in_a_row + 1 if none else 0
        limit = self.config.trainer.max_skipped_steps
        if self._unrewarded_in_a_row >= limit:
            raise RewardError(
                f"no sample had a reward in {limit} steps in a row (trainer.max_skipped_steps="
                f"{limit}): {_functions(self.config)} returned None for all of them, which leaves "
                "nothing to train on"
            )

    def check_ages(self, step: int, groups: Sequence[Group], version: int) -> None:
        """Raises MismatchError when the step that updates `version` has tokens that it may not.
        Rows' own answers are of no version."""
        if not self.config.offline:
            self._mismatch.check_ages(step, groups, version)

    def check_update(
        self, step: int, groups: Sequence[Group], signals: Sequence[Signal], result: UpdateResult
    ) -> None:
        """Raises NonFiniteError when loss or gradients were not finite too often in a row,
        NothingTrainedError when too often in a row no token taught anything, and MismatchError when
        trainer and engines are too far apart."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.nonfinite else 0
        limit = self.config.trainer.max_skipped_steps
        if self._skipped_in_a_row >= limit:
            raise NonFiniteError(
                f"loss or gradients were NaN or infinite in {limit} steps in a row "
                f"(trainer.max_skipped_steps={limit}): {result.nonfinite} of the last one's "
                "optimizer steps, a critic's counted, were left out, and changed nothing"
            )
        self._check_trained(result)
        if not self.config.offline:
            self._mismatch.check(step, groups, signals, result)

    def _check_trained(self, result: UpdateResult) -> None:
        why = _nothing_trained(self.config.algorithm, result)
        self._untrained_in_a_row = self._untrained_in_a_row + 1 if why else 0
        limit = self.config.trainer.max_skipped_steps
        if self._untrained_in_a_row >= limit:
            raise NothingTrainedError(
                f"nothing was learned in {limit} steps in a row (trainer.max_skipped_steps={limit}"
                f"): in the last one {why}"
            )

    def step(self, facts: StepFacts, clock: Clock) -> None:
        """Writes a step's order, samples and metrics."""
        self.run_dir.write_order(facts.step, facts.version, facts.groups)
        trained = (facts.step, facts.groups, facts.signals)
        samples = self.run_dir.write_samples(*trained, values=facts.result.tokens)
        record = {"step": facts.step, **facts.result.metrics, **facts.published}
        record |= {names.VERSION: facts.version, names.SKIPPED: facts.result.skipped}
        record[names.MEMORY_PEAK] = facts.result.peak_gib
        record |= self._routes(facts)
        if self.config.offline:
            record |= data_metrics(facts.samples, clock.seconds["total"])
        else:
            record |= self._of_rollout(facts, clock)
        clock.lap("records")
        stages = (*names.stages(self.config.offline), "records")
        seconds = {names.time(stage): clock.seconds[stage] for stage in stages}
        record |= seconds | {names.STEP_SECONDS: clock.seconds["total"]}
        record |= self._behind(facts.step)
        if self.performance is not None:
            spent = (seconds[names.time("train")], clock.seconds["total"])
            shared = record.get(names.PROMPTS_SHARED, 0.0)
            record |= self.performance.of_step(facts.samples, *spent, shared)
        self.metrics.write(record)
        parts = (samples, facts.groups, facts.signals)
        self.metrics.details(facts.step, details.of_step(*parts, sampled=not self.config.offline))
        self._lines.show(record)
        if not self.config.offline:
            for warning in self._health.look(facts.step, facts.groups, facts.signals):
                console.warn(warning)
        self.done = facts.step

    def _behind(self, step: int) -> dict[str, float]:
        """How many steps would be lost with the run's process, and with its disk."""
        behind: dict[str, float] = {names.CHECKPOINT_BEHIND: step - self.checkpoints.newest}
        if self.copied is not None:
            behind[names.COPY_BEHIND] = step - self.copied()
        return behind

    def _routes(self, facts: StepFacts) -> dict[str, float]:
        """Writes how often each expert was chosen, and sums it up; nothing of a dense model."""
        if (loads := facts.result.expert_loads) is None:
            return {}
        layers = self.spec.shape.moe_layers
        self.run_dir.write_routes(facts.step, layers, loads)
        return expert_loads.metrics(layers, loads)

    def _of_rollout(self, facts: StepFacts, clock: Clock) -> dict[str, float]:
        """What is recorded of how the step's samples came to be."""
        sampled_in = "total" if self.config.schedule.lag else "rollout"
        record = rollout_metrics(facts.samples, clock.seconds[sampled_in])
        record |= draft_metrics(facts.samples)
        record |= age_metrics(facts.samples, facts.version)
        if self.config.schedule.in_flight == "continue":
            record |= continued_metrics(facts.samples)
        record |= environment_metrics(facts.groups)
        record |= reward_metrics(facts.groups, self.config)
        record |= reweight_metrics(facts.groups, facts.signals)
        record |= {names.RESTARTS: facts.restarts, "rollout/drawn_again": self._drawn_again}
        if self.config.schedule.lag:
            record[names.STALE] = facts.stale
        self._drawn_again = self._stayed = 0
        return record

    def keep_unrewarded(self, step: int, groups: Sequence[Group]) -> None:
        """Keeps all samples of a step whose rewards stop the run."""
        self.run_dir.write_samples(step, groups, None, every=True)
        console.warn(f"all samples of step {step} are in {self.run_dir.samples_file}")

    def keep_trained(self, step: int) -> bool:
        """The run ends after `step`, before its time. Returns whether that has no checkpoint
        yet."""
        if step:
            console.warn(f"--resume goes on after step {step}")
        return self.checkpoints.newest < step

    def checkpoint_is_due(self, step: int) -> bool:
        return self.checkpoints.is_due(step, self._is_last(step))

    def _is_last(self, step: int) -> bool:
        ends_early = self.plateau is not None
        return step == self.config.trainer.steps or self.stop_requested or ends_early

    async def checkpoint(self, step: int, book: dict[str, Any], tasks: asyncio.TaskGroup) -> None:
        """Writes one of the step: see `Checkpoints.write`."""
        await self.checkpoints.write(step, book, lambda: self._is_last(step), tasks)

    async def finish(self) -> None:
        """The run ends, and its last evaluation is on record: returns when all that it keeps is
        written."""
        await self.checkpoints.finish()
        if self.checkpoints.newest == self.done:
            await self.checkpoints.judge(self.done)

    def _adapter_written(self, step: int, directory: Path) -> None:
        self.metrics.adapter(step, directory)

    def plateau_at(self, step: int) -> Plateau | None:
        """What ends the run with `step`, by checkpoint.stop_after; None when nothing does."""
        if not self.config.checkpoint.stop_after or step == self.config.trainer.steps:
            return None
        return plateau.of_run(self.config.checkpoint, self.checkpoints.retention.values, step)

    def end_early(self, ended: Plateau, step: int) -> bool:
        """The run ends with `step`. Returns whether that has no checkpoint yet."""
        self.plateau = ended
        return self.checkpoints.newest < step


def _functions(config: RunConfig) -> str:
    """The run's rewards, each after the key that names it."""
    every = [one for functions in config.rewards().values() for one in functions]
    return ", ".join(dict.fromkeys(f"{one.key}={one.function}" for one in every))


def _nothing_trained(algorithm: AlgorithmConfig, result: UpdateResult) -> str:
    """Why no token of a step taught the policy anything; empty when one did. All optimizer steps
    are left out, and none for NaN, when there was no token in the loss."""
    metrics = result.metrics
    if result.skipped == algorithm.updates_per_step and not result.nonfinite:
        masked = metrics.get("replay/masked_tokens", 0.0)  # none without a rollout
        return (
            f"no token was in the loss: {masked:.0f} were left out for missing routes "
            f"(replay.missing), {metrics['loss/rejected_tokens']:.0f} by the algorithm's "
            "rejection, the rest because their samples have no weight (no reward, or "
            "algorithm.mask_truncated)"
        )
    if not isinstance(algorithm, PolicyGradientConfig):
        return ""
    if metrics.get("loss/weight_squared") == 0:
        return (
            f"the weight of every token was 0, beyond the bounds of algorithm.correction="
            f"{algorithm.correction}: mismatch/kl says how far engine and trainer are apart; take "
            "a higher algorithm.correction_max, or a correction by token"
        )
    if metrics.get("loss/rejected_share") == 1:
        return (
            f"algorithm.rejection={algorithm.rejection} rejected every token: mismatch/kl says how "
            "far engine and trainer are apart; take wider bounds"
        )
    return ""
