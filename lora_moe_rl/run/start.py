"""A run from its config to its end: what can be checked is checked before engines start."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lora_moe_rl import algorithms, ports
from lora_moe_rl.algorithms.base import Algorithm
from lora_moe_rl.algorithms.parts.kl_control import KLControl
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.files import eval_files, settings_file, versions_file
from lora_moe_rl.files.checkpoint_writing import adopt
from lora_moe_rl.files.linking import held
from lora_moe_rl.files.pusher import Pusher
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.files.trouble import waited_for
from lora_moe_rl.page import link
from lora_moe_rl.run import adapter_start, goes_on, loop, offline, plateau
from lora_moe_rl.run.actors_start import Actors, started
from lora_moe_rl.run.answers_evaluator import AnswersEvaluator
from lora_moe_rl.run.evaluations import Evaluates, Evaluations
from lora_moe_rl.run.evaluator import Evaluator
from lora_moe_rl.run.frozen_start import FrozenStart
from lora_moe_rl.run.own_ray import OwnRay
from lora_moe_rl.run.performance import Performance
from lora_moe_rl.run.preflight import Preflight
from lora_moe_rl.run.prepared import Prepared
from lora_moe_rl.run.publisher import Publisher
from lora_moe_rl.run.records import Records
from lora_moe_rl.run.room import room
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.signals import Stopped, handled, raise_what_was_lost, says_it_again
from lora_moe_rl.run.stall import Stall, patience
from lora_moe_rl.run.standing import Loop
from lora_moe_rl.run.tickets import TicketBook
from lora_moe_rl.telemetry import console, report
from lora_moe_rl.telemetry.metrics import MetricsWriter
from lora_moe_rl.telemetry.timeline import Timeline


def run(config: RunConfig, resume: bool = False, fork: Path | None = None) -> None:
    """Trains to `trainer.steps`. `resume`: from the newest checkpoint of the run directory; `fork`:
    from that checkpoint of another run, in a new directory.

    A run whose metric gets no better ends before that (checkpoint.stop_after). Raises a
    LoraMoeRlError for what a user can get wrong, DiskWait when the disk keeps it from going on, and
    Stopped when a signal ended the run after one of its steps.
    """
    with waited_for(config.run_dir, resume):
        if goes_on.nothing_is_left(config, resume, fork):
            return
        goes_on.check_places(config, resume)
    with Preflight(config, fetch=True) as ready, OwnRay(config) as own_ray:
        _look(ready, own_ray)
        console.say(room(config, ready.spec).text)
        with RunDir(config, resume, console.warn) as run_dir:
            pusher = Pusher(config.checkpoint, run_dir.path, say=console.warn)
            if fork is not None:
                pusher.begin(
                    to_yaml(config), None
                )  # while nothing is in the directory that a second try would find
                adopt(run_dir.checkpoints, fork)
            with waited_for(run_dir.path, resume):
                found = goes_on.newest(run_dir, ready) if resume or fork else None
                console.log_to(run_dir.log_path("controller"))
            start = None
            if config.adapter.init_from is not None and not found:
                start = _start(ready)
            frozen = FrozenStart.of_run(ready, start, found)
            _run(Prepared.of(ready, run_dir, found, start, frozen), own_ray, pusher)


def evaluate(config: RunConfig, checkpoint_dir: Path | None) -> None:
    """Evaluates the adapter of a checkpoint, or without one that a run of `config` would begin
    with, in a run directory of its own. Trains nothing.

    Raises a LoraMoeRlError for what a user can get wrong.
    """
    goes_on.check_places(config, resume=False)
    with ExitStack() as opened:
        kept = None
        if checkpoint_dir is not None:  # a run that goes on may remove it soon
            beside = config.run_dir.with_name(f".{config.run_dir.name}.evaluated")
            kept = opened.enter_context(held(checkpoint_dir, beside))
        ready = opened.enter_context(Preflight(config, fetch=True))
        own_ray = opened.enter_context(OwnRay(config))
        _look(ready, own_ray)
        found = start = None
        if kept is not None:
            found = goes_on.at(kept, ready)
        elif config.adapter.init_from is not None:
            start = _start(ready)
        with RunDir(config, resume=False, say=console.warn) as run_dir:
            console.log_to(run_dir.log_path("controller"))
            frozen = FrozenStart.of_run(ready, start, found) if config.offline else None
            prepared = Prepared.of(ready, run_dir, found, start, frozen)
            with MetricsWriter(run_dir, config) as metrics, started(prepared, own_ray) as actors:
                _evaluate(prepared, actors, metrics)
            console.say(f"metrics  {run_dir.metrics_file}")
            if not config.offline:
                console.say(f"samples  {eval_files.path_of(run_dir.path, prepared.step)}")
            console.say(f"page     {link.line(run_dir.path)}")


def _start(ready: Preflight) -> adapter_start.Start:
    """The adapter of adapter.init_from; says it when that has learned from other prompts."""
    found = adapter_start.init_from(ready.config, ready.spec, ready.model_dir)
    in_use = ready.tokenizer.chat_template
    if warning := adapter_start.other_template(found, ready.config, ready.model_dir, in_use):
        console.warn(warning)
    return found


def _look(ready: Preflight, own_ray: OwnRay) -> None:
    """Looks at all that is looked at before anything slow starts. Ray starts beside the last of
    it."""
    with console.Starting() as starting:

        def begin(step: str) -> None:
            starting.begin(f"looking at the {step}")
            if step == "prompts":
                own_ray.begin()

        ready.require(console.warn, begin)


def _begin(run: Prepared, pusher: Pusher) -> None:
    """Writes down what the run has from now on, and sets aside what it does anew."""
    pusher.begin(to_yaml(run.config), run.step if run.resumed else None)
    if run.resumed:
        run.run_dir.write_config()  # of a run that is not refused
    run.run_dir.rewind(run.step)  # before the files are opened to go on in them
    eval_files.rewind(run.run_dir.path, run.step)
    versions_file.VERSIONS.note(run.run_dir.path, run.step, versions_file.here())
    if changed := settings_file.note(run.run_dir.path, run.step, run.config):
        console.say_notes([changed])


def _run(run: Prepared, own_ray: OwnRay, pusher: Pusher) -> None:
    with waited_for(run.run_dir.path, run.resumed):
        _begin(run, pusher)
    with (
        pusher,
        MetricsWriter(run.run_dir, run.config) as metrics,
        started(run, own_ray) as actors,
    ):
        parts = (run.config, run.spec, run.model_dir, run.run_dir, actors.trainer, metrics)
        dtype = actors.trainer.dtype
        if run.resumed and run.found is not None and run.found.path is not None:
            pusher.push(run.found.path, None)  # if a stop came before its copy
        records = Records(*parts, done=run.step, dtype=dtype, written=pusher.push)
        if run.config.checkpoint.push_to is not None:
            records.copied = lambda: pusher.pushed or run.step
        records.checkpoints.frozen = None if run.frozen is None else run.frozen.digest
        records.performance = Performance.of_model(run.config, run.spec, run.model_dir, dtype)
        with _signals(records), records.checkpoints:
            _go(run, actors, records, metrics)
    try:
        report.finish(run.run_dir)
    except OSError as error:  # all that counts is written
        console.warn(f"no table and no pictures of the run: {error}")
    if records.stop_requested:
        console.say_stopped(run.run_dir, records.done)
        raise Stopped
    if records.plateau is not None:
        why = plateau.text(run.config.checkpoint, records.plateau)
        console.say(f"ended after step {records.done}: {why}")


def _evaluate(run: Prepared, actors: Actors, metrics: MetricsWriter) -> None:
    engines, publisher = _served(run, actors, goes_on.restore(run, actors.trainer))
    timeline = Timeline(run.config.num_engines, run.run_dir.write_timeline)
    evaluator = _evaluator(run, actors.trainer, engines, timeline, metrics)

    async def serve_and_ask() -> None:
        await actors.trainer.hold(run.step)
        _connect(run, actors)
        await publisher.start()
        await evaluator.evaluate(run.step, publisher.version)

    asyncio.run(serve_and_ask(), loop_factory=Loop)


def _evaluator(
    run: Prepared,
    trainer: ports.Trainer,
    engines: ports.Sampler,
    timeline: Timeline,
    metrics: MetricsWriter,
) -> Evaluates:
    """Engines answer held-out prompts; where nothing is sampled, the trainer judges the rows' own
    answers."""
    asked = run.held_out, run.environment
    if run.config.offline:
        parts = algorithms.make(run.config), trainer, timeline, metrics
        return AnswersEvaluator(run.config, *asked, *parts)
    return Evaluator(run.config, *asked, engines, timeline, run.run_dir, metrics)


def _connect(run: Prepared, actors: Actors) -> None:
    """Lets a reward ask the engines, if one does."""
    if run.connect is not None:
        assert actors.served is not None  # an offline run has no reward
        run.connect(actors.served.engines)


def _go(run: Prepared, actors: Actors, records: Records, metrics: MetricsWriter) -> None:
    """Steps until done, or until a signal asks to stop after the current one."""
    config, trainer = run.config, actors.trainer
    engines, publisher = _served(run, actors, goes_on.restore(run, trainer))
    timeline = Timeline(config.num_engines, run.run_dir.write_timeline)
    evaluator = _evaluator(run, trainer, engines, timeline, metrics)
    evaluations = Evaluations(config, evaluator, engines, goes_on.evaluated(run.run_dir))
    made = algorithms.make(config)
    driven = loop.Ports(
        config,
        run.source,
        run.environment,
        made,
        engines,
        trainer,
        publisher,
        records,
        timeline,
        evaluations,
        _teacher(run, actors, made, publisher, timeline),
        _kl_control(run, made),
    )
    asked, algorithm = config.schedule, config.algorithm
    schedule = Schedule(
        algorithm.prompts_per_step,
        asked.lag,
        algorithm.updates_per_step,
        asked.stale,
        asked.in_flight == "continue",
    )
    done = run.found.metadata.get("done", []) if run.found else []
    book = TicketBook(schedule, done, timeline.wait)

    async def steps() -> None:
        await trainer.hold(run.step)
        _connect(run, actors)
        await _watched(run, actors, book, timeline, loop.run(driven, book, run.step + 1))

    asyncio.run(steps(), loop_factory=Loop)


async def _watched(
    run: Prepared, actors: Actors, book: TicketBook, timeline: Timeline, steps: Coroutine
) -> None:
    """The run's steps, unless they get stuck."""
    if not run.config.faults.stall_s:
        return await steps
    from lora_moe_rl.cluster import stacks

    engines = actors.served.engines if actors.served else None

    def under_way() -> list[str]:
        returning = engines.returning if engines else ()
        return [*timeline.under_way, *(f"engine-{index}: start" for index in returning)]

    def dump() -> str:
        stacks.append_own(run.run_dir.log_path("controller"))
        every = [*actors.trainer.places, *(engines.places if engines else ())]
        asked = ["controller", *stacks.dump(every)]
        return f"The stacks of {', '.join(asked)} are in {run.run_dir.logs}"

    stall = Stall(patience(run.config), lambda: book.progress, under_way, lambda: book.waits, dump)
    await stall.watched(steps)


def _kl_control(run: Prepared, algorithm: Algorithm) -> KLControl | None:
    """What the weight of the KL goes on from, if it follows the KL."""
    control = algorithm.kl_control
    if control is None or run.found is None:
        return control
    begun = control.coef
    control.load_state_dict(run.found.metadata)
    note = f"kl_coef goes on at {control.coef:.4g}: algorithm.kl_coef={begun:g} is a run's first"
    console.say_notes([note])
    return control


def _teacher(
    run: Prepared,
    actors: Actors,
    algorithm: Algorithm,
    publisher: ports.Publisher,
    timeline: Timeline,
) -> ports.Teacher | None:
    """Whom the algorithm asks about samples, if anybody."""
    if algorithm.teacher is None:
        return None
    from lora_moe_rl.run import taught

    assert actors.served is not None  # an offline run has no teacher
    engines, asked = actors.served.engines, (algorithm, run.config, run.environment)
    return taught.open_teacher(*asked, engines, lambda: publisher.version, timeline)


def _served(run: Prepared, actors: Actors, version: int) -> tuple[ports.Sampler, ports.Publisher]:
    """Who samples, and who serves `version` and those after it."""
    if actors.served is None:
        return offline.NoEngines(), offline.Unserved(version)
    config, trainer, (engines, channel) = run.config, actors.trainer, actors.served
    publisher = Publisher(config, trainer, engines, channel, run.source, trainer.dtype, version)
    engines.prove, engines.renew = publisher.prove_returned, trainer.renew
    return engines, publisher


@contextmanager
def _signals(records: Records) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the run after its step, with a checkpoint; a second
    Ctrl-C or SIGTERM ends it at once."""

    def ask(signum, frame):
        if says_it_again(signum, records.stop_requested):
            return
        if records.stop_requested:
            raise KeyboardInterrupt
        records.stop_requested = True
        console.say_stopping()

    with handled(ask):
        raise_what_was_lost()
        yield
