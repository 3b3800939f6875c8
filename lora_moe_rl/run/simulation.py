"""A run as a simulation: the schedule itself, over stages of given lengths. Pure.

Engines decode in steps that take `token_s + sequence_s * groups in flight` seconds and give every
sequence one token; a group is there after the steps of its longest response, and its reward later.
The trainer's update and the publish follow each other, and engines go on meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_moe_rl.run.schedule import Schedule

WARMUP, MEASURED = 10, 40  # steps
DONE = 1e-9  # of a token


@dataclass(frozen=True)
class Stages:
    """Seconds of one step's stages, with `lengths` of the longest responses of groups, in tokens,
    which come in this order again and again."""

    lengths: Sequence[int]
    token_s: float
    sequence_s: float
    reward_s: float
    update_s: float
    publish_s: float


@dataclass(frozen=True)
class Outcome:
    """What a simulated run came to, without its first ten steps: seconds of a step, and shares of
    idle time."""

    step_s: float
    idle_trainer: float
    idle_engines: float


@dataclass(eq=False)
class _Group:
    number: int
    version: int
    engine: int
    left: float  # tokens, then seconds of its reward
    sampled: bool = False


@dataclass
class _Run:
    """`ends`: when the update and publish end that go on, None when there are none."""

    schedule: Schedule
    stages: Stages
    engines: int
    now: float = 0.0
    newest: int = 0
    ends: float | None = None
    steps: int = 0
    busy_trainer: float = 0.0
    busy_engines: float = 0.0
    training: list[_Group] = field(default_factory=list)
    rolling: list[_Group] = field(default_factory=list)
    scored: list[_Group] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)


def simulate(schedule: Schedule, stages: Stages, engines: int) -> Outcome:
    """Runs 50 steps, and looks at the last 40."""
    run = _Run(schedule, stages, engines)
    while run.steps < WARMUP:
        _event(run)
    start, trainer, sampling = run.now, run.busy_trainer, run.busy_engines
    while run.steps < WARMUP + MEASURED:
        _event(run)
    seconds = run.now - start
    busy = (run.busy_trainer - trainer) / seconds, (run.busy_engines - sampling) / seconds / engines
    idle = (max(0.0, 1 - share) for share in busy)  # sums of floats may be a bit above 1
    return Outcome(seconds / MEASURED, *idle)


def _event(run: _Run) -> None:
    """All begin what they can; then time goes on to the next end of something."""
    _begin(run)
    in_flight = [0] * run.engines
    for group in run.rolling:
        in_flight[group.engine] += not group.sampled
    paces = [run.stages.token_s + run.stages.sequence_s * count for count in in_flight]
    times = [group.left * (1 if group.sampled else paces[group.engine]) for group in run.rolling]
    if run.ends is not None:
        times.append(run.ends - run.now)
    seconds = min(times)
    run.now += seconds
    run.busy_engines += seconds * sum(count > 0 for count in in_flight)
    run.busy_trainer += seconds * (run.ends is not None)
    for group in run.rolling:
        group.left -= seconds / (1 if group.sampled else paces[group.engine])
    _end(run)


def _begin(run: _Run) -> None:
    while run.schedule.may_admit(len(run.training) + len(run.rolling) + len(run.scored)):
        number = next(run.numbers)
        engines = [group.engine for group in run.rolling if not group.sampled]
        engine = min(range(run.engines), key=engines.count)
        length = run.stages.lengths[number % len(run.stages.lengths)]
        run.rolling.append(_Group(number, run.newest, engine, length))
    if run.ends is None:
        run.training = run.schedule.next_step(run.scored, run.rolling, run.newest)
        if run.training:
            run.scored = [group for group in run.scored if group not in run.training]
            run.ends = run.now + run.stages.update_s + run.stages.publish_s


def _end(run: _Run) -> None:
    for group in [group for group in run.rolling if group.left <= DONE]:
        if not group.sampled and run.stages.reward_s:
            group.sampled, group.left = True, run.stages.reward_s
        else:
            run.rolling.remove(group)
            run.scored.append(group)
    if run.ends is not None and run.now >= run.ends - DONE:
        run.ends, run.training = None, []
        run.newest += run.schedule.versions_per_step
        run.steps += 1
