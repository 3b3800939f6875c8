"""How far engines and trainer may be apart on the tokens of a step, and how old those may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import NOT_SAMPLED, Group, Sample
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import MismatchError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.telemetry import console, names

# Of mismatch/kl (mismatch.stop_above=null), by the trainer's dtype: far above rounding, so that
# what is beyond is a fault. Seen were up to 2e-12 in float32 (docs/figures.md), and in bfloat16
# 3e-5 with replayed routes, 4e-4 without (docs/replay_figures.md).
STOP_ABOVE: dict[Dtype, float] = {"float32": 1e-7, "bfloat16": 0.1}
ROUTED_APART = 1e-4  # in float32, where the trainer does not replay what engines chose


def stop_above(config: RunConfig, dtype: Dtype) -> float:
    """mismatch.stop_above, or what stands for it."""
    if config.mismatch.stop_above is not None:
        return config.mismatch.stop_above
    if config.trainer.fp8_forward == "engine":  # both round activations to eight bits
        dtype = "bfloat16"
    replayed = config.replay.mode == "r3" and config.replay.missing != "route"
    return STOP_ABOVE[dtype] if replayed else max(ROUTED_APART, STOP_ABOVE[dtype])


class MismatchBounds:
    """What stops a run whose engines and trainer are not one policy. `dtype` is the trainer's."""

    def __init__(self, config: RunConfig, run_dir: RunDir, dtype: Dtype):
        self.config, self.run_dir = config, run_dir
        self.stop_above = stop_above(config, dtype)
        self._told_unjudged = False

    def check_ages(self, step: int, groups: Sequence[Group], version: int) -> None:
        """Raises MismatchError when the step that updates `version` has a token of a newer one, or
        of one that is older than the schedule allows, or none that a policy sampled."""
        found = sampled_versions(sample for group in groups for sample in group.samples)
        schedule, updates = self.config.schedule, self.config.algorithm.updates_per_step
        oldest = version - schedule.max_age * updates
        if not found.size:
            raise MismatchError(f"step {step}: none of its tokens was sampled by the policy")
        for token in (int(found.min()), int(found.max())):
            if not oldest <= token <= version:
                raise MismatchError(
                    f"step {step} updates adapter version {version}, and has a token that was "
                    f"sampled under version {token}: with schedule.lag={schedule.lag} and "
                    f"{updates} versions a step all must be of {oldest} to {version} "
                    f"(schedule.stale={schedule.stale})"
                )

    def check(
        self, step: int, groups: Sequence[Group], signals: Sequence[Signal], result: UpdateResult
    ) -> None:
        """Raises MismatchError for a step whose mismatch is above a bound, once all its samples are
        written; the worst token is named. A step of NaN is for max_skipped_steps to judge."""
        metrics = result.metrics
        if result.nonfinite:
            return
        self._warn_unjudged(step, metrics)
        for name, setting, bound in self._bounds(metrics):
            if metrics[name] <= bound:
                continue
            self.run_dir.write_samples(step, groups, signals, every=True, values=result.tokens)
            raise MismatchError(
                f"step {step}: {name} is {metrics[name]:.2e}, more than {bound:.2e}: engines and "
                f"trainer give the sampled tokens logprobs that are "
                f"{metrics[names.MISMATCH_LARGEST]:.2e} apart at most: {_worst(groups, metrics)}. "
                f"The update was not published. All samples of the step are in "
                f"{self.run_dir.samples_file}; replay.compare_every=1 shows what routes have to do "
                f"with it, and mismatch.{setting} sets the limit"
            )

    def _bounds(self, metrics: Mapping[str, float]) -> list[tuple[str, str, float]]:
        """(metric, setting, bound) of all that is judged. With schedule.lag each age is for itself,
        and NaN where it has no token; a NaN among the logprobs makes mismatch/kl one."""
        ages, old = self.config.schedule.max_age, self.config.mismatch.stop_above_old
        if not self.config.schedule.lag or math.isnan(metrics[names.MISMATCH_KL]):
            return [(names.MISMATCH_KL, "stop_above", self.stop_above)]
        bounds = [(names.kl_of_age(0), "stop_above", self.stop_above)]
        bounds += [(names.kl_of_age(age), "stop_above_old", old) for age in range(1, ages + 1)]
        return [bound for bound in bounds if not math.isnan(metrics[bound[0]])]

    def _warn_unjudged(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics[names.MISMATCH_JUDGED] or self._told_unjudged:
            return
        self._told_unjudged = True
        text = (
            f"step {step}: no sampled token is of the version that is updated (schedule.lag="
            f"{self.config.schedule.lag}), so that mismatch.stop_above judges none; the mismatch "
            f"of older ones, which the training since then is part of, is bounded by "
            f"mismatch.stop_above_old={self.config.mismatch.stop_above_old:g}"
        )
        console.warn(text)


def sampled_versions(samples: Iterable[Sample]) -> np.ndarray:
    """The versions of the tokens that a policy sampled."""
    versions = np.concatenate([sample.versions for sample in samples])
    return versions[versions != NOT_SAMPLED]


def _worst(groups: Sequence[Group], metrics: Mapping[str, float]) -> str:
    """The token where engine and trainer are furthest apart."""
    number, place = int(metrics[names.WORST_SAMPLE]), int(metrics[names.WORST_TOKEN])
    if number < 0:
        return "none differs"
    owners = [(group.prompt, sample) for group in groups for sample in group.samples]
    prompt, sample = owners[number]
    return (
        f"token {int(sample.token_ids[place])} at {place} of sample {number} (prompt "
        f"{prompt.number}, {len(sample.prompt_ids)} tokens of prompt, version "
        f"{_version(sample, place)}), rollout "
        f"{metrics[names.WORST_ROLLOUT]:.4f} and trainer {metrics[names.WORST_TRAINER]:.4f}"
    )


def _version(sample: Sample, place: int) -> int:
    return int(sample.versions[place - len(sample.prompt_ids)])
