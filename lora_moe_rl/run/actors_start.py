"""Ray and the actors of a run: trainer ranks, engines, and the transport between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import own_files
from lora_moe_rl.run.held_base import held_base
from lora_moe_rl.run.own_ray import OwnRay
from lora_moe_rl.run.prepared import Prepared
from lora_moe_rl.run.publisher import plan_layouts
from lora_moe_rl.telemetry import console

if TYPE_CHECKING:
    from lora_moe_rl.cluster.engines import RolloutEngines
    from lora_moe_rl.cluster.lasting_trainer import LastingTrainer
    from lora_moe_rl.cluster.placement import Placement
    from lora_moe_rl.cluster.trainer import TrainerRanks
    from lora_moe_rl.refit.transports import Channel


class Served(NamedTuple):
    """The engines, and how versions come to them."""

    engines: RolloutEngines
    channel: Channel


class Actors(NamedTuple):
    """What has started. `served` is None when nothing is sampled."""

    trainer: LastingTrainer
    served: Served | None


@contextmanager
def started(run: Prepared, own_ray: OwnRay) -> Iterator[Actors]:
    """Starts all actors, once Ray has started; ends them and Ray, whatever happens."""
    starting, config = console.Starting(), run.config
    try:
        with starting:
            starting.begin("starting Ray")
            own_ray.wait()
            from lora_moe_rl.cluster.placement import Placement

            seen = [run.model_dir, run.run_dir.path, *own_files(config)]
            placement = Placement(config, seen)
        if config.offline:
            yield _start_trainer(run, placement, starting)
        else:
            with held_base(run) as held:
                yield _start_all(run, placement, starting, held)
    finally:
        own_ray.end()


def _start_trainer(run: Prepared, placement: Placement, starting: console.Starting) -> Actors:
    """Starts the trainer of a run that samples nothing: no engine starts, and there is nothing to
    send."""
    from lora_moe_rl.cluster.actors import states
    from lora_moe_rl.cluster.trainer import TrainerRanks

    with starting:
        starting.begin("starting trainer ranks")
        trainer = TrainerRanks(run.config, run.spec, run.model_dir, run.run_dir, placement)
        starting.watch(lambda: states(trainer.starting))
        trainer.start_async()
        started = trainer.wait_started()
    console.say_started([{k: v for k, v in one.items() if k != "place"} for one in started], [])
    _say_offloaded(run.config, started)
    console.say_offline(run.config)
    return Actors(_lasting(run, trainer), None)


def _say_offloaded(config: RunConfig, ranks: list[dict]) -> None:
    offload = config.trainer.offload
    if offload != "none" and ranks[0]["device"] == "cpu":
        console.warn(
            f"trainer.offload={offload} saves no memory on the CPU, where everything is in "
            "the host's memory anyway; the same copies are made as beside a GPU"
        )


def _lasting(run: Prepared, ranks: TrainerRanks) -> LastingTrainer:
    from lora_moe_rl.cluster.lasting_trainer import LastingTrainer, fits

    return LastingTrainer(ranks, run.config, run.run_dir, fits(run.config, run.spec))


def _start_all(
    run: Prepared, placement: Placement, starting: console.Starting, held: str | None
) -> Actors:
    """Trainer ranks and engines, and the transport between them. `held`: see `held_base`."""
    from lora_moe_rl.cluster.actors import states
    from lora_moe_rl.cluster.engines import RolloutEngines
    from lora_moe_rl.cluster.trainer import TrainerRanks
    from lora_moe_rl.refit.transports import choose

    config, where = run.config, (run.model_dir, run.run_dir, placement)
    with starting:
        starting.begin("starting trainer ranks and rollout engines")
        trainer = TrainerRanks(config, run.spec, *where, held)
        engines = RolloutEngines(config, run.spec, *where, held)
        starting.watch(lambda: states(trainer.starting | engines.starting))
        engines.start_async()
        if placement.same_gpus:  # vLLM takes what others allocate while it starts for its own
            engines.wait_started()
        trainer.start_async()
        started = (trainer.wait_started(), engines.wait_started())
        places = [[actor.pop("place") for actor in actors] for actors in started]
        places[1] += engines.further_places
        if config.rollout.least_engines is not None and "RAY_ADDRESS" in os.environ:
            places[1].append("a node that has room for an engine that joins")
        channel = choose(config.refit, *places)
    console.say_started(*started)
    _say_offloaded(config, started[0])
    layouts = plan_layouts(config, run.spec, started[1][0]["dtype"])
    trainer.prepare_refit(layouts, channel)
    engines.prepare_refit(layouts, channel)
    return Actors(_lasting(run, trainer), Served(engines, channel))
