"""The run: one process that drives trainer ranks and rollout engines, step after step.

    prompts ──> engines: samples + routes ──> rewards ──> advantages
                    ^                │                        │
                    │                └── routes, by reference ┤
                    │                                         v
              proof <── publish <── adapter shards <── trainer ranks: update

Nothing here knows Megatron or vLLM. Bulk data (routes, adapter shards) goes from its maker to its
user by reference; the controller sees token ids, logprobs, rewards and metrics.
"""

from __future__ import annotations

import math
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.algorithms.advantages import group_normalized
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.data.samples import Prompt, Sample
from lora_moe_rl.errors import ConfigError, NonFiniteError, RefitError, RewardError
from lora_moe_rl.files import checkpoint
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.models.directory import check_model_dir, resolve_model
from lora_moe_rl.models.fingerprint import base_record, check_unchanged
from lora_moe_rl.models.fit import check_layout
from lora_moe_rl.refit.parts import STORAGE, check_complete, part_layouts
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.refit.proof import Proof, check_served, default_tolerance
from lora_moe_rl.refit.transports import choose
from lora_moe_rl.rewards.runner import RewardRunner
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.rollout.platform import check_engine
from lora_moe_rl.run import adapter_start as starting
from lora_moe_rl.telemetry import console, report
from lora_moe_rl.telemetry.clock import Clock
from lora_moe_rl.telemetry.metrics import MetricsWriter

PROBE_TOKENS = 256


def run(config: RunConfig, resume: bool = False) -> None:
    """Trains to `trainer.steps`. What a user can get wrong is checked before engines start."""
    if config.reward.function is None:
        raise ConfigError(
            "reward.function is not set: name a function as module:function or file.py:function, "
            "or lora_moe_rl.rewards:exact_match to compare with the answer column"
        )
    model_dir = resolve_model(config.model.path).absolute()
    spec = make_spec(config, model_dir)
    source = make_source(config, model_dir)
    rewards = RewardRunner(config.reward.function, config.reward.timeout_s)
    with RunDir(config, resume) as run_dir, rewards:
        found = None
        if resume:
            found = checkpoint.newest_valid(run_dir.checkpoints)
            console.say_resume(found)
            if found.path:
                check_unchanged(found.metadata["base"], model_dir)
                starting.other_ranks(found, config, spec)
        console.log_to(run_dir.log_path("controller"))
        start = None
        if config.adapter.init_from is not None and not (found and found.path):
            start = starting.init_from(config, spec, model_dir)
        Controller(config, spec, model_dir, source, rewards, run_dir).run(found, start)


def make_spec(config: RunConfig, model_dir: Path) -> AdapterSpec:
    """Raises ModelError or ConfigError for a model or a layout that cannot work."""
    shape = ModelShape.from_hf_config(check_model_dir(model_dir))
    check_layout(shape, config)
    spec = AdapterSpec.build(shape, config.adapter, servable=config.refit.mode == "adapter")
    check_engine(config, spec)
    return spec


def make_source(config: RunConfig, model_dir: Path) -> PromptSource:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return PromptSource(config.data, tokenizer, config.seed, config.max_prompt_tokens)


class Controller:
    def __init__(self, config, spec, model_dir, source, rewards, run_dir):
        self.config: RunConfig = config
        self.spec: AdapterSpec = spec
        self.model_dir: Path = model_dir
        self.source: PromptSource = source
        self.rewards: RewardRunner = rewards
        self.run_dir: RunDir = run_dir
        self.base = base_record(config.model.path, model_dir)
        self.version = -1
        self.skipped_in_a_row = 0

    def run(self, found: Found | None, start: starting.Start | None = None) -> None:
        """Steps until done, or until a signal asks to stop after the current one."""
        step = saved = found.metadata["step"] if found and found.path else 0
        self.run_dir.rewind(step)  # before the files are opened to go on in them
        metrics = MetricsWriter(self.run_dir, self.config)
        with metrics, self._engines(), self._signals():
            if step:
                self._restore(found)
            elif start is not None:
                self.trainer.set_adapter(start.tensors)
                console.say_notes(start.notes)
            self._publish()
            while step < self.config.trainer.steps and not self.stop_requested:
                step += 1
                record = {"step": step, **self._step(step)}
                metrics.write(record)
                console.step_line(record)
                every = self.config.checkpoint.every
                if every and step % every == 0:
                    self._checkpoint(step)
                    saved = step
            if step > saved:
                self._checkpoint(step)
        report.finish(self.run_dir)
        if self.stop_requested:
            console.say_stopped(self.run_dir, step)
            raise KeyboardInterrupt

    @contextmanager
    def _engines(self):
        """Starts Ray and all actors; ends them, whatever happens."""
        import ray

        from lora_moe_rl.cluster.actors import start_ray
        from lora_moe_rl.cluster.engines import RolloutGroup
        from lora_moe_rl.cluster.placement import Placement
        from lora_moe_rl.cluster.trainer import TrainerGroup

        config = self.config
        start_ray(config.trainer.world_size + config.rollout.engines)
        try:
            with console.starting():
                placement = Placement(config, [self.model_dir, self.run_dir.path])
                where = (self.model_dir, self.run_dir, placement)
                self.trainer = TrainerGroup(config, self.spec, *where)
                self.engines = RolloutGroup(config, self.spec, *where, self._prove_returned)
                self.engines.start_async()
                self.trainer.start_async()
                ranks = self.trainer.wait_started()
                engines = self.engines.wait_started()
                places = [[actor.pop("place") for actor in actors] for actors in (ranks, engines)]
                self.channel = choose(config.refit, *places)
                console.say_started(ranks, engines)
            self.dtype: str = ranks[0]["dtype"]
            self._prepare_refit(engines[0]["dtype"])
            yield
        finally:
            ray.shutdown()

    @contextmanager
    def _signals(self):
        """The first Ctrl-C or SIGTERM ends the run after its step, with a checkpoint; the second
        ends it at once."""

        def ask(signum, frame):
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            console.say_stopping()

        self.stop_requested = False
        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _restore(self, found: Found) -> None:
        meta = found.metadata
        old = starting.other_ranks(found, self.config, self.spec)
        if old is None:
            self.trainer.load(found.path, meta["trainer"])
        else:
            with starting.resized(found, old, self.spec, self.config.seed) as (directory, notes):
                self.trainer.load(directory, meta["trainer"])
            console.say_notes(notes)
        self.source.load_state_dict(meta["data"])
        self.version = meta["trainer"]["version"] - 1

    def _step(self, step: int) -> dict[str, float]:
        clock = Clock()
        prompts = self.source.next(self.config.algorithm.prompts_per_step)
        with console.progress(self._samples_per_step, self.config) as progress:
            rollout = self.engines.generate(prompts, self.version, self._seed(step), progress)
        clock.lap("rollout")
        rewards, failures = self.rewards.score(prompts, rollout.samples)
        self._check_rewards(rewards, failures, len(rollout.samples))
        clock.lap("reward")
        batch, advantages = self._batch(step, rollout.samples, rewards)
        result, sent_refs = self.trainer.update(batch, rollout.table_refs)
        self._check_finite(result)
        clock.lap("train")
        version = self.version
        refit = self._publish(sent_refs, result.version)
        clock.lap("refit")
        self.run_dir.write_samples(step, prompts, rollout.samples, rewards, advantages)
        record = dict(result.metrics) | refit | rollout_metrics(rollout.samples, clock.seconds)
        record |= reward_metrics(rewards, failures)
        record |= {"adapter/version": version, "optim/skipped": result.skipped}
        record |= {"rollout/restarts": self.engines.restarts}
        stages = {f"time/{stage}": clock.seconds[stage] for stage in report.STAGES}
        clock.lap("records")
        return record | stages | {"time/step": clock.seconds["total"]}

    @property
    def _samples_per_step(self) -> int:
        return self.config.algorithm.prompts_per_step * self.config.algorithm.group_size

    def _seed(self, step: int) -> int:
        """Sampling is seeded by (run seed, step), so that no generator's state must be saved."""
        return int(np.random.SeedSequence([self.config.seed, step]).generate_state(1)[0])

    def _batch(self, step: int, samples: list[Sample], rewards: np.ndarray):
        from lora_moe_rl.data.batch import TrainBatch

        config = self.config.algorithm
        groups = np.array([s.group for s in samples])
        advantages, keep = group_normalized(rewards, groups, config.normalize_std)
        if config.mask_truncated:
            keep = keep & ~np.array([s.truncated for s in samples])
        per_mini_batch = config.prompts_per_step // config.mini_batches
        return TrainBatch.from_samples(
            samples, advantages, keep.astype(np.float32), groups // per_mini_batch, step
        ), advantages

    def _check_rewards(self, rewards: np.ndarray, failures: list[str], total: int) -> None:
        if len(failures) > self.config.reward.max_failed * total:
            raise RewardError(
                f"{len(failures)} of {total} rewards failed, more than reward.max_failed="
                f"{self.config.reward.max_failed:g} allows; the first: {failures[0]}"
            )

    def _check_finite(self, result) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.nonfinite else 0
        limit = self.config.trainer.max_skipped_steps
        if self.skipped_in_a_row >= limit:
            raise NonFiniteError(
                f"loss or gradients were NaN or infinite in {limit} steps in a row "
                f"(trainer.max_skipped_steps={limit}); the adapter is unchanged since then"
            )

    def _prepare_refit(self, dtype: str) -> None:
        """Both ends learn once what will go from which trainer rank to which engine rank."""
        config = self.config
        merged = config.refit.mode == "merged"
        engine = EngineLayout.of(config.rollout, slot_rank(self.spec), merged)
        plan = make_plan(self.spec, config.trainer, engine, STORAGE[dtype].itemsize)
        layouts = part_layouts(plan, self.spec, dtype)
        check_complete(layouts, self.spec, engine)
        self.trainer.prepare_refit(layouts, self.channel)
        self.engines.prepare_refit(layouts, self.channel)

    def _publish(self, sent_refs=None, version: int | None = None) -> dict[str, float]:
        """Serves the trainer's adapter, proves that it is served, and forgets the last version."""
        clock = Clock()
        if version is None:
            sent_refs, version = self.trainer.send(), self.version + 1
            self._prepare_probe()
        elif version == self.version:  # the update was skipped: nothing new to serve
            return {"refit/seconds": 0.0, "refit/bytes": 0, "refit/max_diff": 0.0}
        self.channel.published(lambda: self.trainer.sent(sent_refs))
        receipts = self.engines.publish(version, sent_refs)
        self.channel.keep(range(version - self.config.refit.slots + 1, version + 1))
        try:
            proof = self._prove(version)
        except RefitError as error:
            differing = self.engines.roll_back(version, sent_refs)
            found = f"engines hold something else than was sent in {', '.join(differing)}"
            same = "what can be read back of the engines is what was sent"
            raise RefitError(f"{error}; {found if differing else same}") from error
        self.version = version
        clock.lap("refit")
        return {
            "refit/seconds": clock.seconds["total"],
            "refit/bytes": sum(receipt.bytes for receipt in receipts),
            "refit/max_diff": proof.max_diff,
        }

    def _prepare_probe(self) -> None:
        """Probe sequences, and what the bare base says of them in both engines."""
        state = self.source.state_dict()
        prompts: list[Prompt] = self.source.next(self.config.refit.proof_prompts)
        self.source.load_state_dict(state)
        self.probe = [(p.token_ids * 2)[:PROBE_TOKENS] for p in prompts]
        scores, tables = self.engines.score(self.probe, None)
        self.engine_base = scores
        self.trainer_base = self.trainer.score(self.probe, tables[0], adapters=False)

    def _prove(self, version: int):
        scores, tables = self.engines.score(self.probe, version)
        trainer = self.trainer.score(self.probe, tables[0])
        proofs = [
            self._check_served(engine, trainer, base, version)
            for engine, base in zip(scores, self.engine_base, strict=True)
        ]
        return max(proofs, key=lambda proof: proof.max_diff)

    def _prove_returned(self, index: int, version: int) -> None:
        """Of an engine that was started anew."""
        if self.config.refit.mode == "adapter":  # merged weights hold the base no more
            self.engine_base[index], _ = self.engines.score_by(index, self.probe, None)
        scores, table = self.engines.score_by(index, self.probe, version)
        trainer = self.trainer.score(self.probe, table)
        self._check_served(scores, trainer, self.engine_base[index], version)

    def _check_served(self, engine, trainer, engine_base, version: int) -> Proof:
        tolerance = self.config.refit.proof_tolerance or default_tolerance(self.dtype)
        return check_served(engine, trainer, engine_base, self.trainer_base, tolerance, version)

    def _checkpoint(self, step: int) -> None:
        """Adapter, moments, counters and data position: complete, or not at all."""
        metadata: dict[str, Any] = {
            "step": step,
            "data": self.source.state_dict(),
            "adapter": self.config.adapter.model_dump(mode="json"),
            "base": self.base,
        }
        writer = checkpoint.write_checkpoint(
            self.run_dir.checkpoints, step, self.config.checkpoint.keep, metadata
        )
        with writer as directory:
            metadata["trainer"] = self.trainer.save(directory)
        peft.write(self.run_dir.adapter, self.spec, self.trainer.adapter(), self.config)


def rollout_metrics(samples: list[Sample], seconds: dict[str, float]) -> dict[str, float]:
    tokens = sum(len(s.response_ids) for s in samples)
    return {
        "rollout/tokens": tokens,
        "rollout/tokens_per_second": tokens / seconds["rollout"],
        "rollout/truncated": sum(s.truncated for s in samples) / len(samples),
        "rollout/response_length": tokens / len(samples),
    }


def reward_metrics(rewards: np.ndarray, failures: list[str]) -> dict[str, float]:
    """Over the samples that have a reward; NaN when none has."""
    given = rewards[~np.isnan(rewards)]
    return {
        "reward/mean": float(given.mean()) if len(given) else math.nan,
        "reward/std": float(given.std()) if len(given) else math.nan,
        "reward/failed": len(failures),
    }
