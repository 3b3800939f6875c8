"""One evaluation: every held-out prompt once, by the engines that a run samples with, under one
adapter version.

A sample's seed is of eval.seed, the set's name, the row and the sample's place alone: not of the
run's seed, the step, the engines or what else they do. Nothing is trained on, and no logprob of the
trainer is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.evaluation import EVAL, EvalSetConfig
from lora_moe_rl.data.held_out import seed_of_prompt
from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.errors import EngineDied, RewardError
from lora_moe_rl.evaluation.scoring import sample_lines, set_metrics
from lora_moe_rl.files import eval_files
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.ports import Manner, Sampler
from lora_moe_rl.telemetry import console, names
from lora_moe_rl.telemetry.metrics import MetricsWriter
from lora_moe_rl.telemetry.timeline import EVALUATE, Timeline
from lora_moe_rl.telemetry.timeline import engine as engine_name


class Evaluator:
    """`held_out`: the prompts of every set, by its name `eval/NAME`."""

    def __init__(
        self,
        config: RunConfig,
        held_out: Mapping[str, Sequence[Prompt]],
        environment: Environment,
        engines: Sampler,
        timeline: Timeline,
        run_dir: RunDir,
        metrics: MetricsWriter,
    ):
        self.config, self.held_out, self.engines = config, held_out, engines
        self.timeline, self.run_dir, self.metrics = timeline, run_dir, metrics
        self.sets = config.eval.sources()
        self.environments = {
            name: environment.held_out(one.samples, one.max_response_tokens)
            for name, one in self.sets.items()
        }

    async def evaluate(self, step: int, version: int) -> None:
        """Asks all sets under `version`, which is served, and writes samples and then metrics: an
        evaluation is on record whole or not at all.

        Raises EngineDied when no engine serves the version any more, and RewardError when more
        rewards of a set failed than reward.max_failed allows; the samples are written then, each
        with its failure, and no metrics.
        """
        started = time.perf_counter()
        groups = await self._ask_all(version)
        record: dict[str, float] = {
            "step": step,
            names.EVAL_STEP: step,
            names.EVAL_VERSION: version,
            names.EVAL_SECONDS: time.perf_counter() - started,
        }
        sets = [(name.removeprefix(EVAL), self.sets[name], own) for name, own in groups.items()]
        lines = [line for one in sets for line in sample_lines(*one)]
        self.run_dir.check_there()
        self.run_dir.evaluations.write(step, lines)
        for name, own in groups.items():
            self._check_failed(name, own, step)
        for one in sets:
            record |= set_metrics(*one)
        self.metrics.write(record)
        console.show_evaluation(record, self.config.eval)

    async def _ask_all(self, version: int) -> dict[str, list[Group]]:
        """The groups of every set, in the order of its prompts."""
        room = asyncio.Semaphore(self.config.eval.prompts_at_once)
        tasks = {
            name: [asyncio.create_task(self._ask(prompt, version, room)) for prompt in prompts]
            for name, prompts in self.held_out.items()
        }
        every = [task for own in tasks.values() for task in own]
        try:
            await asyncio.gather(*every)
        finally:
            for task in every:
                task.cancel()
            await asyncio.gather(*every, return_exceptions=True)
        return {name: [task.result() for task in own] for name, own in tasks.items()}

    async def _ask(self, prompt: Prompt, version: int, room: asyncio.Semaphore) -> Group:
        """A prompt's samples, scored. Asked again when its engine dies, as long as another one
        serves the version or will."""
        name = prompt.data_set
        manner = self._manner(self.sets[name])
        seed = seed_of_prompt(self.config.eval.seed, name, prompt.number)

        def watch(index: int) -> AbstractContextManager[None]:
            return self.timeline.span(engine_name(index), EVALUATE, prompt.number)

        async with room:
            while True:
                policy = self.engines.policy(version, seed, watch, manner)
                try:
                    group = await self.environments[name].rollout(prompt, policy)
                except EngineDied:
                    if self.engines.lost(version):
                        raise
                    continue
                group.routes = None  # nobody replays them: their memory is free
                return group

    def _manner(self, settings: EvalSetConfig) -> Manner:
        temperature = settings.temperature
        return Manner(
            temperature=self.config.rollout.temperature if temperature is None else temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_response_tokens,
        )

    def _check_failed(self, name: str, groups: Sequence[Group], step: int) -> None:
        failures = [failure for group in groups for failure in group.failures]
        total = sum(len(group.ends) for group in groups)
        if len(failures) > self.config.reward.max_failed * total:
            raise RewardError(
                f"{len(failures)} of {total} rewards of {name.replace(EVAL, 'eval.sets.', 1)} "
                f"failed, more than reward.max_failed={self.config.reward.max_failed:g} allows; "
                f"the first: {failures[0]}; all samples are in "
                f"{eval_files.path_of(self.run_dir.path, step)}"
            )
