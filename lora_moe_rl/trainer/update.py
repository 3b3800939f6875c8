"""One step's update: the forwards that the loss wants first, then the optimizer steps.

Which forwards those are is said by `algorithms.passes`; nothing here knows an algorithm:

old         of the adapter before the update; with replay.mode=r2 it also records the routes. When
            each rollout makes one update the current logprobs, detached, are the old ones
reference   of the base: adapters off; or of the adapter that the run started from, frozen. Its
            own routers choose, as those of any other model
values      of the critic, if there is one
free        every replay.compare_every steps, without replay: what the mismatch would be
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.shards import Shard
from lora_moe_rl.algorithms import passes
from lora_moe_rl.algorithms.base import Pass
from lora_moe_rl.algorithms.parts.aggregation import Scales
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.kept import with_tokens
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.router_replay.audit import due
from lora_moe_rl.router_replay.routes import Routes, Sent
from lora_moe_rl.telemetry import names, peak
from lora_moe_rl.trainer import reference
from lora_moe_rl.trainer.advantages import everywhere, revise
from lora_moe_rl.trainer.critic import tokens_in
from lora_moe_rl.trainer.engine import TrainingEngine, Work
from lora_moe_rl.trainer.meter import WITH, WITHOUT, Meter
from lora_moe_rl.trainer.objective import choose_tokens, scales_of, tokens_of, total_of
from lora_moe_rl.trainer.optimizer import EMPTY, StepResult
from lora_moe_rl.trainer.selection import select_tokens
from lora_moe_rl.trainer.token_values import Kept


def update(engine: TrainingEngine, batch: TrainBatch, parts: Sequence[Sent]) -> UpdateResult:
    """Called on all ranks together, each with the whole batch or its share. `parts`: the rollout's
    routes, for r3."""
    started = time.perf_counter()
    peak.begin()
    config, version = engine.config, engine.version
    if config.replay.mode == "r3" and not parts:
        raise ReplayError("replay.mode=r3, but the rollout came without routes")
    routes = engine.routes(batch, parts if config.replay.mode == "r3" else ())
    compared = routes is not None and due(batch.step, config.replay.compare_every)
    meter = _meter(engine)
    looked_at = Kept(batch, with_tokens(config.logging, len(batch)))
    with engine.watched_replay(batch, routes) as replay:
        samples = batch.of_mini_batches(config.algorithm.mini_batches)
        groups = engine.my_works(batch, samples, routes, *_dp())
        everything = [work for works in groups for work in works]
        for work in everything:
            meter.add("tokens given", work.data.counted.sum())
            meter.add("tokens fed", work.data.counted[work.data.fed].sum())
        if compared:
            _compare(engine, everything, meter)
        moved = reference.moved(engine, meter)
        _before_update(engine, everything, moved)
        advantages = revise(engine, batch, everything, meter)
        kept = choose_tokens(engine, batch, everything, meter)
        select_tokens(engine, batch, samples, everything, meter)
        scales = [scales_of(engine, batch, kept, mine) for mine in samples]
        results, of_critic = [], []
        for _ in range(config.algorithm.epochs):
            for mine, works, one in zip(samples, groups, scales, strict=True):
                if engine.critic is not None:
                    of_critic.append(engine.critic.step(works, tokens_in(batch, mine), meter))
                one_step = (works, meter, one, batch.step, looked_at)
                results.append(_optimizer_step(engine, *one_step))
        if engine.version > version:  # ages count steps, whichever of a step's updates were made
            engine.version = version + config.algorithm.updates_per_step
        disagreement = meter.disagreement(replay, engine.spec.shape.moe_layers)
        loads = meter.expert_loads(replay, engine.spec.shape)
    metrics = meter.metrics(results, compared)
    if moved is not None:
        metrics |= reference.metrics(meter, moved, version, engine.device.dtype_name)
    tokens, fed = meter.summed(["tokens given", "tokens fed"])
    metrics[names.PROMPTS_SHARED] = 1 - fed / tokens
    if engine.critic is not None:
        metrics |= engine.critic.metrics(of_critic, meter)
    if engine.on_host is not None:
        seconds, nbytes = engine.on_host.taken()
        metrics |= {"offload/seconds": seconds, "offload/moved": nbytes / 2**30}
    if not config.offline:
        metrics |= disagreement | replay_metrics(engine, batch, routes, meter)
    (peak_gib,) = meter.all_reduce([peak.gib()], dist.ReduceOp.MAX)
    return UpdateResult(
        version=engine.version,
        metrics=metrics,
        skipped=sum(not r.applied for r in results),
        nonfinite=sum(not np.isfinite(r.grad_norm) for r in (*results, *of_critic)),
        seconds=time.perf_counter() - started,
        peak_gib=peak_gib,
        advantages=advantages if dist.get_rank() == 0 else None,
        tokens=looked_at.everywhere(meter),
        expert_loads=loads,
    )


def gradients(
    engine: TrainingEngine, batch: TrainBatch, parts: Sequence[Sent]
) -> tuple[float, float, list[Shard]]:
    """(loss, gradient norm, this rank's shards of the gradient) of one step on all samples, before
    clipping; the adapter stays as it is. The loss is that of `update`."""
    meter = _meter(engine)
    routes = engine.routes(batch, parts)
    with engine.watched_replay(batch, routes):
        everyone = np.arange(len(batch))
        works = engine.my_work(batch, everyone, routes, *_dp())
        _before_update(engine, works, reference.moved(engine, meter))
        revise(engine, batch, works, meter)
        kept = choose_tokens(engine, batch, works, meter)
        select_tokens(engine, batch, [everyone], works, meter)
        scales = scales_of(engine, batch, kept, everyone)
        _backward(engine, works, meter, scales)
    shards = engine.adapters.export(of=lambda parameter: parameter.grad)
    return meter.loss(scales.divisor), engine.adapters.gradients.norm(), shards


def judge(engine: TrainingEngine, batch: TrainBatch) -> dict[Pass, list[np.ndarray]]:
    """Logprobs of every sample's response tokens, float64 [R], on every rank, as `old` of the
    current adapter, and as `reference` of what it is measured against, if it is; routers choose.
    Nothing changes."""
    meter, wanted = _meter(engine), passes(engine.config) - {"values"} | {"old"}
    temperature = engine.config.rollout.temperature
    with engine.watched_replay(batch, None):
        works = engine.my_work(batch, np.arange(len(batch)), None, *_dp())
        engine.forward(works, "old", temperature)
        if "reference" in wanted:
            with engine.as_reference():
                engine.forward(works, "reference", temperature)
    return {name: everywhere(name, batch, works, meter) for name in sorted(wanted)}


def critic_gradients(
    engine: TrainingEngine, batch: TrainBatch, parts: Sequence[Sent]
) -> tuple[float, list[np.ndarray], list[Shard]]:
    """(loss of the critic, its values [R] of each sample on every rank, this rank's shards of its
    gradient) of one step on all samples, before clipping; nothing changes. Raises ValueError
    without a critic."""
    if engine.critic is None:
        raise ValueError(f"algorithm={engine.config.algorithm.name} has no critic")
    meter, routes = _meter(engine), engine.routes(batch, parts)
    with engine.watched_replay(batch, routes):
        everyone = np.arange(len(batch))
        works = engine.my_work(batch, everyone, routes, *_dp())
        _before_update(engine, works, reference.moved(engine, meter))
        revise(engine, batch, works, meter)
        values = everywhere("values", batch, works, meter)
        tokens = tokens_in(batch, everyone)
        engine.critic.backward(works, tokens, meter)
    shards = engine.critic.adapters.export(of=lambda parameter: parameter.grad)
    (loss,) = meter.summed(["critic/loss"])
    return loss / tokens, values, shards


def _meter(engine: TrainingEngine) -> Meter:
    config = engine.config
    of_device = engine.device, engine.is_last_stage, engine.algorithm
    versions = config.schedule.max_age, engine.version, config.algorithm.updates_per_step
    return Meter(*of_device, *versions, config.algorithm.epochs)


def _dp() -> tuple[int, int]:
    return ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()


def _compare(engine: TrainingEngine, works: list[Work], meter: Meter) -> None:
    """What the mismatch would be if routers chose for themselves."""
    engine.forward(works, "free", engine.config.rollout.temperature, replay=False)
    if engine.is_last_stage:
        for work in works:
            meter.mismatch(WITHOUT, work.data, work.known.pop("free"))


def _before_update(
    engine: TrainingEngine, works: list[Work], moved: reference.Moved | None
) -> None:
    """`moved`: what `reference.moved` says. A start that the policy still is takes its routes too,
    so that their KL is 0."""
    config = engine.config
    temperature, wanted = config.rollout.temperature, passes(config)
    if "old" in wanted:
        record, entropy = config.replay.mode == "r2", engine.algorithm.selects_by_entropy
        engine.forward(works, "old", temperature, record=record, entropy=entropy)
    if "reference" in wanted:
        with engine.as_reference():
            same = moved is not None and not moved.away
            engine.forward(works, "reference", temperature, replay=same)
    if engine.critic is not None:
        engine.critic.evaluate(works)


def _optimizer_step(
    engine: TrainingEngine,
    works: list[Work],
    meter: Meter,
    scales: Scales,
    step: int,
    looked_at: Kept,
) -> StepResult:
    _backward(engine, works, meter, scales, looked_at)
    engine.audit.check()
    alone = engine.critic is not None and engine.critic.learns_alone(step)
    if scales.divisor == 0:
        return EMPTY if alone else engine.optimizer.passed_over()
    if alone:
        return StepResult(True, engine.optimizer.norm(), 0.0)  # measured, nothing more
    result = engine.optimizer.step()
    engine.version += result.applied
    return result


def _backward(
    engine: TrainingEngine,
    works: list[Work],
    meter: Meter,
    scales: Scales,
    looked_at: Kept | None = None,
) -> None:
    """Gradients of the loss of `works`, over all ranks."""

    def loss(work: Work, logprobs: torch.Tensor):
        assert work.entropy is not None  # there is one of each forward with gradients
        data = work.data
        trained = work.entropy if engine.algorithm.trains_entropy else None
        tokens = tokens_of(work, logprobs, trained, work.divergence)
        entropy = work.entropy = work.entropy.detach()
        work.divergence = None
        found = engine.algorithm.loss(tokens)
        total = total_of(found, work, tokens, scales)
        meter.add("tokens", work.stands.sum())
        meter.add("loss", total.detach())
        meter.add_metrics(found.metrics, on_device(torch.from_numpy(work.stands), total.device))
        before = work.known.get("old", logprobs.detach())
        meter.mismatch(WITH, data, before)
        if engine.frozen_start is not None:
            reference.measure(work, before, meter)
        if looked_at is not None:
            meter.later(lambda: looked_at.take(data, before, entropy))
        judged = data.sampled if meter.sampled else work.mask
        meter.later(lambda: meter.add("entropy", entropy.cpu().numpy()[judged].sum()))
        return total, tokens.mask.sum().to(torch.int), {}

    head = engine.head(engine.config.rollout.temperature)
    engine.forward_backward(works, loss, head, scales.divisor)


def replay_metrics(
    engine: TrainingEngine, batch: TrainBatch, routes: Routes | None, meter: Meter
) -> dict[str, float]:
    """Raises ReplayError when a step that was to be audited did not compare all it should."""
    if routes is None:
        recorded = float(engine.config.replay.mode == "r2")
        return {"replay/coverage": recorded, "replay/missing_tokens": 0.0}
    metrics = {
        "replay/coverage": routes.coverage,
        "replay/missing_tokens": float(len(routes.incomplete)),
        "replay/bytes": meter.all_reduce([routes.bytes], dist.ReduceOp.MAX)[0],
    }
    if due(batch.step, engine.config.replay.audit):
        layers = engine.spec.shape.moe_layers
        compared = meter.all_reduce([engine.audit.compared[layer] for layer in layers])
        engine.audit.check_compared(batch.step, dict(zip(layers, compared, strict=True)))
        metrics[names.AUDITED] = sum(compared)
    return metrics
