"""A run from its config to its end: what can be checked is checked before engines start."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import ENVIRONMENTS
from lora_moe_rl.errors import CheckpointError, RunDirError
from lora_moe_rl.files import checkpoint
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.models.fingerprint import check_unchanged
from lora_moe_rl.ports import Prompts, Rewards
from lora_moe_rl.run import adapter_start, loop
from lora_moe_rl.run.preflight import Preflight
from lora_moe_rl.run.publisher import Publisher, plan_layouts
from lora_moe_rl.run.records import Records
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.signals import ENDING, Stopped, raise_what_was_lost
from lora_moe_rl.run.tickets import TicketBook
from lora_moe_rl.telemetry import console, report
from lora_moe_rl.telemetry.metrics import MetricsWriter
from lora_moe_rl.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from lora_moe_rl.cluster.engines import RolloutEngines
    from lora_moe_rl.cluster.trainer import TrainerRanks
    from lora_moe_rl.refit.transports import Channel


@dataclass(frozen=True)
class Prepared:
    """What a run is made of before anything slow has started. `found` is the checkpoint to go on
    from, `start` the adapter to begin with; None when there is none."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    source: Prompts
    rewards: Rewards
    run_dir: RunDir
    found: Found | None = None
    start: adapter_start.Start | None = None

    @property
    def step(self) -> int:
        """The step that the run goes on from."""
        return self.found.metadata["step"] if self.found else 0


class Actors(NamedTuple):
    """What has started."""

    trainer: TrainerRanks
    engines: RolloutEngines
    channel: Channel


def run(config: RunConfig, resume: bool = False, fork: Path | None = None) -> None:
    """Trains to `trainer.steps`. `resume`: from the newest checkpoint of the run directory; `fork`:
    from that checkpoint of another run, in a new directory.

    Raises a LoraMoeRlError for what a user can get wrong, and Stopped when a signal ended the run
    after one of its steps.
    """
    if (step := _steps_done(config, resume, fork)) >= config.trainer.steps:
        console.say_done(step, config.trainer.steps)
        return
    with Preflight(config, fetch=True) as ready:
        with console.Starting() as starting:
            ready.require(console.warn, starting.begin)
        with RunDir(config, resume) as run_dir:
            if fork is not None:
                checkpoint.adopt(run_dir.checkpoints, fork)
            found = _found(run_dir, ready) if resume or fork else None
            console.log_to(run_dir.log_path("controller"))
            start = None
            if config.adapter.init_from is not None and not found:
                start = adapter_start.init_from(config, ready.spec, ready.model_dir)
            parts = (config, ready.spec, ready.model_dir, ready.source, ready.rewards, run_dir)
            _run(Prepared(*parts, found=found, start=start))


def _steps_done(config: RunConfig, resume: bool, fork: Path | None) -> int:
    """What the checkpoint to go on from has done, as far as it has to be known before anything
    starts. Raises RunDirError when there is none to fork."""
    if fork is not None:
        if not (fork / checkpoint.MANIFEST).is_file():
            raise RunDirError(
                f"--resume-from {fork} is no checkpoint (it has no {checkpoint.MANIFEST}); name "
                "one by its directory: RUN/checkpoints/step-000100"
            )
        try:
            return checkpoint.read_manifest(fork)["step"]
        except CheckpointError as error:
            raise RunDirError(f"--resume-from {fork} is not valid: {error}") from error
    root = RunDir(config, resume).checkpoints
    if not resume or checkpoint.newest_step(root) < config.trainer.steps:
        return 0
    return checkpoint.newest_valid(root).metadata["step"]


def _found(run_dir: RunDir, ready: Preflight) -> Found | None:
    """The checkpoint to go on from, which fits base and adapter; None when there is none yet."""
    newest = checkpoint.newest_valid(run_dir.checkpoints)
    console.say_resume(newest)
    if newest.path is None:
        return None
    check_unchanged(newest.metadata["base"], ready.model_dir)
    adapter_start.other_ranks(newest, ready.config, ready.spec)
    return newest


def _run(run: Prepared) -> None:
    run.run_dir.rewind(run.step)  # before the files are opened to go on in them
    with MetricsWriter(run.run_dir, run.config) as metrics, _actors(run) as actors:
        parts = (run.config, run.spec, run.model_dir, run.run_dir, actors.trainer, metrics)
        records = Records(*parts, done=run.step, dtype=actors.trainer.dtype)
        with _signals(records):
            _go(run, actors, records)
    report.finish(run.run_dir)
    if records.stop_requested:
        console.say_stopped(run.run_dir, records.done)
        raise Stopped


def _go(run: Prepared, actors: Actors, records: Records) -> None:
    """Steps until done, or until a signal asks to stop after the current one."""
    config, (trainer, engines, channel) = run.config, actors
    version = _restore(run, trainer)
    publisher = Publisher(config, trainer, engines, channel, run.source, trainer.dtype, version)
    engines.prove = publisher.prove_returned
    timeline = Timeline(config.rollout.engines, run.run_dir.write_timeline)
    environment = ENVIRONMENTS.find(config.environment.name)
    ports = loop.Ports(
        config,
        run.source,
        environment(config.environment, run.rewards, config.algorithm.group_size),
        algorithms.make(config),
        engines,
        trainer,
        publisher,
        records,
        timeline,
    )
    asked, algorithm = config.schedule, config.algorithm
    schedule = Schedule(
        algorithm.prompts_per_step, asked.lag, algorithm.updates_per_step, asked.stale
    )
    done = run.found.metadata.get("done", []) if run.found else []
    asyncio.run(loop.run(ports, TicketBook(schedule, done, timeline.wait), run.step + 1))


def _restore(run: Prepared, trainer: TrainerRanks) -> int:
    """Adapter, moments and data as the run goes on from them. Returns the adapter's version."""
    if run.found is None:
        if run.start is not None:
            trainer.set_adapter(run.start.tensors)
            console.say_notes(run.start.notes)
        return 0
    found, meta = run.found, run.found.metadata
    assert found.path is not None
    old = adapter_start.other_ranks(found, run.config, run.spec)
    if old is None:
        trainer.load(found.path, meta["trainer"])
    else:
        resized = adapter_start.resized(found, old, run.spec, run.config.seed)
        with resized as (directory, notes):
            trainer.load(directory, meta["trainer"])
        console.say_notes(notes)
    run.source.load_state_dict(meta["data"])
    return meta["trainer"]["version"]


@contextmanager
def _actors(run: Prepared) -> Iterator[Actors]:
    """Starts Ray and all actors; ends them, whatever happens."""
    starting, config = console.Starting(), run.config
    with starting:
        starting.begin("importing Ray")
        import ray

        from lora_moe_rl.cluster.actors import start_ray, states
        from lora_moe_rl.cluster.engines import RolloutEngines
        from lora_moe_rl.cluster.placement import Placement
        from lora_moe_rl.cluster.trainer import TrainerRanks
        from lora_moe_rl.refit.transports import choose

    try:
        with starting:
            starting.begin("starting Ray")
            start_ray(config.trainer.world_size + config.rollout.engines)
            starting.begin("starting trainer ranks and rollout engines")
            placement = Placement(config, [run.model_dir, run.run_dir.path])
            where = (run.model_dir, run.run_dir, placement)
            trainer = TrainerRanks(config, run.spec, *where)
            engines = RolloutEngines(config, run.spec, *where)
            starting.watch(lambda: states(trainer.starting | engines.starting))
            engines.start_async()
            trainer.start_async()
            started = (trainer.wait_started(), engines.wait_started())
            places = [[actor.pop("place") for actor in actors] for actors in started]
            channel = choose(config.refit, *places)
        console.say_started(*started)
        layouts = plan_layouts(config, run.spec, started[1][0]["dtype"])
        trainer.prepare_refit(layouts, channel)
        engines.prepare_refit(layouts, channel)
        yield Actors(trainer, engines, channel)
    finally:
        ray.shutdown()


@contextmanager
def _signals(records: Records) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after its step, with a checkpoint; the second ends
    it at once."""

    def ask(signum, frame):
        if records.stop_requested:
            raise KeyboardInterrupt
        records.stop_requested = True
        console.say_stopping()

    before = {number: signal.signal(number, ask) for number in ENDING}
    try:
        raise_what_was_lost()
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
