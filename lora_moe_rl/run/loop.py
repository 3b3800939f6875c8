"""The run: three kinds of task, one ticket book, one pure schedule. Who waits for whom:

    feed ──ticket──> roll (xN) ──scored group──> learn ──update──> publish ──┐
      ^                                                                      │
      └───────────── a slot, when a group is trained AND served ─────────────┘

    task    takes             waits for                              is let go by
    feed    a prompt          a slot (schedule.may_admit)            learn: groups are trained
    roll    a waiting ticket  the environment: policy, rewards       feed, or a ticket given back
    learn   a step of groups  scored groups (schedule.next_step)     roll

With lag 0 the schedule makes them take turns; the code is the same for all. Evaluations come
between two steps, or go on beside them (`evaluations.py`). Nothing here knows a
loss, an engine, a transport or Ray: those stand behind `ports.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from lora_moe_rl.algorithms.base import Algorithm, Signal
from lora_moe_rl.algorithms.parts.kl_control import KLControl
from lora_moe_rl.algorithms.parts.step_signals import revised, signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Group
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.errors import EngineDied, EngineLost, LoraMoeRlError, RewardError
from lora_moe_rl.ports import Prompts, Publisher, Ref, Sampler, Teacher, Trainer
from lora_moe_rl.run import greedy
from lora_moe_rl.run.evaluations import Evaluations
from lora_moe_rl.run.records import Records, StepFacts
from lora_moe_rl.run.schedule import seed_of
from lora_moe_rl.run.tickets import Ticket, TicketBook
from lora_moe_rl.run.timed_policy import TimedPolicy
from lora_moe_rl.telemetry import names
from lora_moe_rl.telemetry.clock import Clock
from lora_moe_rl.telemetry.timeline import CHECKPOINT, PUBLISH, TRAINER, UPDATE, Timeline

log = logging.getLogger(__name__)


@dataclass
class Ports:
    """All that the loop drives."""

    config: RunConfig
    source: Prompts
    environment: Environment
    algorithm: Algorithm
    engines: Sampler
    trainer: Trainer
    publisher: Publisher
    records: Records
    timeline: Timeline
    evaluations: Evaluations
    teacher: Teacher | None = None
    kl: KLControl | None = None


async def run(ports: Ports, book: TicketBook, first_step: int) -> None:
    """Steps from `first_step` until trainer.steps, until `records.stop_requested`, or until the
    metric gets no better: nobody waits then for what is still sampled. When a task fails all end,
    and its own error is raised."""
    await ports.publisher.start()
    steps = ports.config.trainer.steps - first_step + 1
    book.wanted = steps * book.schedule.groups_per_step
    try:
        async with asyncio.TaskGroup() as tasks:
            await ports.evaluations.take(first_step - 1, ports.publisher.version, book, tasks)
            rolling = [tasks.create_task(feed(ports, book))]
            rolling += [tasks.create_task(roll(ports, book)) for _ in range(book.schedule.width)]
            await learn(ports, book, first_step, tasks)
            book.close()
            for task in rolling:
                task.cancel()
            await ports.evaluations.ended()  # which judges the last checkpoint
            await ports.records.finish()
        ports.evaluations.check()
    except BaseExceptionGroup as group:
        raise _first(group) from None


async def feed(ports: Ports, book: TicketBook) -> None:
    while await book.slot():
        drawn_at = ports.source.state_dict()
        try:
            book.admit(ports.source.next(1)[0], drawn_at)
        except Exception as error:
            book.fail(error)


async def roll(ports: Ports, book: TicketBook) -> None:
    """What fails for good, as an engine that dies too often or an environment of the user's that
    raises, ends the run after the update that is under way."""
    config = ports.config
    while ticket := await book.claim(lambda: ports.publisher.version):
        seed = seed_of(config.seed, ticket.number, config.algorithm.prompts_per_step)
        begins = partial(_first_request, ports, book, ticket)
        policy = TimedPolicy(ports.engines, ports.timeline, ticket, seed, begins=begins)
        try:
            rolling = ports.environment.rollout(ticket.prompt, policy)
            if ports.algorithm.greedy_baseline:
                alone = ports.environment.held_out(1, None)
                likeliest = TimedPolicy(ports.engines, ports.timeline, ticket, seed, greedy.GREEDY)
                other = alone.rollout(ticket.prompt, likeliest)
                rolling = greedy.beside(rolling, other, ports.algorithm)
            group = await rolling
            if ports.teacher is not None:
                await ports.teacher.score(group)
            policy.scored()
            # Failures count in their step, and may be why the rest has no signal.
            again = config.algorithm.draw_again and not group.failures
            alike = again and not ports.algorithm.has_signal(group)
        except EngineDied:
            book.give_back(ticket)
            continue
        except Exception as error:
            book.fail(error)
            return
        if alike:
            book.drop(ticket, "equal rewards")
            try:
                ports.records.drawn_again(group)
            except RewardError as error:
                book.fail(error)
        else:
            ports.records.rolled(len(group.ends))
            book.scored(ticket, group)


def _first_request(ports: Ports, book: TicketBook, ticket: Ticket) -> None:
    book.asks(ticket, ports.publisher.version)


async def learn(ports: Ports, book: TicketBook, first_step: int, tasks: asyncio.TaskGroup) -> None:
    config, records = ports.config, ports.records
    for step in range(first_step, config.trainer.steps + 1):
        clock = Clock()
        async with _kept(ports, book, step - 1, tasks):
            with records.progress():
                tickets = await book.next_step(ports.publisher.version)
            if tickets is None:
                return
            clock.lap("rollout", at=max(ticket.sampled_at for ticket in tickets))
            clock.lap("reward")
            groups = [ticket.group for ticket in tickets if ticket.group is not None]
            _check_rewards(records, step, groups)
            records.check_ages(step, groups, ports.publisher.version)
            signals, batch = _to_train(ports, step, groups)
            await ports.engines.all_back()
            ports.engines.overwrite()
            await ports.engines.give_way()
        with ports.timeline.span(TRAINER, UPDATE, step):
            routes = [group.routes for group in groups]
            result, parts = await ports.trainer.update(batch, routes)
        signals = revised(signals, result.advantages)
        _follow_kl(ports, result)
        records.check_update(step, groups, signals, result)
        clock.lap("train")
        version = ports.publisher.version
        published, lost = await _published(ports, groups, result, parts)
        clock.lap("refit")
        book.trained(tickets)
        records.step(
            StepFacts(
                step,
                groups,
                signals,
                result,
                version,
                published | ports.timeline.step(step),
                restarts=ports.engines.restarts,
                stale=book.stale,
            ),
            clock,
        )
        if lost is not None:
            async with _kept(ports, book, step, tasks):
                raise lost
        if await _ends_with(ports, book, step, tasks):
            return


async def _published(
    ports: Ports, groups: Sequence[Group], result: UpdateResult, parts: Sequence[Ref]
) -> tuple[dict[str, float], EngineLost | None]:
    """Metrics of the update's version, which is served now. When an engine is lost over it: what
    there is to raise once the step is kept, since it was trained all the same."""
    samples = [sample for group in groups for sample in group.samples]
    with ports.timeline.span(PUBLISH, PUBLISH, result.version):
        try:
            return await ports.publisher.publish(result.version, parts, samples), None
        except EngineLost as error:
            return {}, error


@asynccontextmanager
async def _kept(
    ports: Ports, book: TicketBook, step: int, tasks: asyncio.TaskGroup
) -> AsyncIterator[None]:
    """Around what is done while the trainer has the state of `step`, which is on record: an error
    ends the run once that is in a checkpoint."""
    try:
        yield
    except Exception:
        try:
            await _keep(ports, book, step, tasks)
            book.close()
            await ports.records.finish()
        except LoraMoeRlError as second:
            log.warning("step %d, the last that was trained, has no checkpoint: %s", step, second)
        raise


async def _keep(ports: Ports, book: TicketBook, step: int, tasks: asyncio.TaskGroup) -> None:
    """The run ends before its time: writes the checkpoint of `step` unless there is one."""
    await ports.evaluations.ended()
    if ports.records.keep_trained(step):
        await _checkpoint(ports, book, step, tasks)


async def _ends_with(ports: Ports, book: TicketBook, step: int, tasks: asyncio.TaskGroup) -> bool:
    """Whether the run ends with `step`, which is on record. Writes its checkpoint and takes its
    evaluation, where they are due; one that is to end meanwhile ends after that."""
    records = ports.records
    if records.checkpoint_is_due(step):
        await _checkpoint(ports, book, step, tasks)
    if records.stop_requested:
        return True
    async with _kept(ports, book, step, tasks):
        if ports.evaluations.is_due(step):
            await ports.evaluations.ended()
        if not records.stop_requested:
            await ports.evaluations.take(step, ports.publisher.version, book, tasks)
        if records.stop_requested:
            await _keep(ports, book, step, tasks)
            return True
        return await _ends_early(ports, book, step, tasks)


def _check_rewards(records: Records, step: int, groups: Sequence[Group]) -> None:
    """Raises RewardError once all samples are on record, for whoever mends the reward."""
    try:
        records.check_rewards(groups)
    except RewardError:
        records.keep_unrewarded(step, groups)
        raise


def _to_train(ports: Ports, step: int, groups: Sequence[Group]) -> tuple[list[Signal], TrainBatch]:
    config = ports.config
    draws = np.random.default_rng([config.seed, step, 1])  # the same after a resume
    signals = signals_of(ports.algorithm, groups, draws)
    share, mini_batches = config.trainer.shares_prompts, config.algorithm.mini_batches
    batch = TrainBatch.from_groups(groups, signals, mini_batches, step, share)
    batch.kl_coef = None if ports.kl is None else ports.kl.coef
    return signals, batch


def _follow_kl(ports: Ports, result: UpdateResult) -> None:
    """The weight of the KL in the steps to come, by that of a step in which the policy was trained;
    the one that it had is recorded."""
    if ports.kl is None:
        return
    result.metrics[names.KL_COEF] = ports.kl.coef
    if result.version > ports.publisher.version:
        ports.kl.follow(result.metrics[names.KL])


async def _checkpoint(ports: Ports, book: TicketBook, step: int, tasks: asyncio.TaskGroup) -> None:
    """With schedule.lag engines go on meanwhile; without it they and the trainer take turns."""
    await ports.evaluations.ended()
    state = book.state_dict(ports.source.state_dict())
    state |= {} if ports.kl is None else ports.kl.state_dict()
    turns = nullcontext() if ports.config.schedule.lag else book.held("a checkpoint")
    with turns, ports.timeline.span(TRAINER, CHECKPOINT, step):
        await ports.records.checkpoint(step, state, tasks)


async def _ends_early(ports: Ports, book: TicketBook, step: int, tasks: asyncio.TaskGroup) -> bool:
    """Whether the run ends with `step` because its metric gets no better (checkpoint.stop_after):
    evaluated as at its end, which may show that it does, and with a checkpoint."""
    records = ports.records
    if records.plateau_at(step) is None:
        return False
    await ports.evaluations.take(step, ports.publisher.version, book, tasks, last=True)
    await ports.evaluations.ended()
    ports.evaluations.check()
    if (ended := records.plateau_at(step)) is None:
        return False
    if records.end_early(ended, step):
        await _checkpoint(ports, book, step, tasks)
    return True


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that the others followed from: tasks that are told to end raise none."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
