"""The ranks and engines of a training service, and the backend over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.models.directory import base_name
from lora_moe_rl.models.fingerprint import base_record
from lora_moe_rl.run.actors_start import Served, started
from lora_moe_rl.run.own_ray import OwnRay
from lora_moe_rl.run.preflight import Preflight
from lora_moe_rl.run.prepared import Prepared
from lora_moe_rl.run.publisher import Publisher
from lora_moe_rl.service.backend import Facts
from lora_moe_rl.service.loras import Places
from lora_moe_rl.service.probe import Probe
from lora_moe_rl.service.settings import check_used, without_unused
from lora_moe_rl.telemetry import console

if TYPE_CHECKING:
    from lora_moe_rl.adapters.families import ModelShape
    from lora_moe_rl.cluster.trainer import TrainerRanks
    from lora_moe_rl.service.engine_room import EngineRoom

SUFFIXES = (".py", ".yaml", ".json", ".toml")
MODELS = "models"  # of a service's directory: checkpoints, by model


def config_of(target: str, settings: list[str], directory: Path) -> RunConfig:
    """The config of a recipe, a config file or a model, for a service that keeps its files in
    `directory`. Raises ConfigError for settings that a service does not have."""
    is_file = target.endswith(SUFFIXES)
    given, unused = without_unused(load_config(target) if is_file else RunConfig(model=target))
    config = override(given, settings)
    check_used(config)
    refused = {
        "refit.mode=merged": config.refit.mode == "merged",
        f"adapter.init={config.adapter.init}": config.adapter.starts_from_base,
        f"adapter.init_from={config.adapter.init_from}": config.adapter.init_from is not None,
        f"trainer.offload={config.trainer.offload}": config.trainer.offloads_moments,
        "replay.mode=r2": config.replay.mode == "r2",
    }
    if wrong := [name for name, set_ in refused.items() if set_]:
        raise ConfigError(
            f"{wrong[0]} is not there with a training service, whose clients come and go with "
            "models of their own; leave it out"
        )
    if unused:
        console.warn(f"{target} sets {', '.join(unused)}, which clients of a service choose")
    began = f"{datetime.now():%Y%m%d-%H%M%S}"
    return config.model_copy(
        update={
            "replay": config.replay.model_copy(update={"missing": "route"}),
            "logging": config.logging.model_copy(update={"run_dir": str(directory / began)}),
        }
    )


@contextmanager
def backend(config: RunConfig, name: str) -> Iterator[EngineRoom]:
    """Everything that the service calls, as long as the context lasts; `name` is what clients call
    the base. Raises a LoraMoeRlError for what cannot work, before anything slow starts."""
    with Preflight(config, fetch=True) as ready, OwnRay(config) as own_ray:
        ready.require(console.warn, steps=("model", "layout", "machine"))
        shape = ready.spec.shape
        facts = facts_of(config, name, shape)
        config = roomy(config, facts)
        places = Places(config, ready.spec)
        own_ray.begin()
        with RunDir(config, resume=False, say=console.warn) as run_dir:
            console.log_to(run_dir.log_path("controller"))
            probe = Probe(shape.vocab_size, config.model.max_length, config.seed)
            run: Any = Prepared(
                config=config,
                spec=ready.spec,
                model_dir=ready.model_dir,
                source=probe,  # pyright: ignore[reportArgumentType] # as much of it as is asked
                held_out={},
                environment=None,  # pyright: ignore[reportArgumentType] # nobody asks it
                run_dir=run_dir,
                private=ready.private,
            )
            with started(run, own_ray) as actors:
                assert actors.served is not None
                yield _room(run, facts, actors.trainer.ranks, actors.served, places)


def _room(run: Prepared, facts: Facts, trainer: Any, served: Served, places: Places) -> EngineRoom:
    from lora_moe_rl.cluster.service_ranks import ServiceRanks
    from lora_moe_rl.service.engine_room import EngineRoom
    from lora_moe_rl.service.routes import RouteStore
    from lora_moe_rl.service.sampling import Samplers

    ranks: TrainerRanks = trainer
    config, (engines, channel) = run.config, served
    parts = config, ranks, engines, channel, run.source, ranks.dtype
    publisher = Publisher(*parts)
    replayed = config.replay.mode == "r3" and bool(run.spec.shape.moe_layers)
    store = RouteStore(run.spec.shape, config.trainer) if replayed else None
    samplers = Samplers(engines, config, store, facts)
    base = base_record(str(config.model.path), run.model_dir, config.model.revision)
    parts = facts, places, base, ServiceRanks(ranks), engines
    return EngineRoom(*parts, publisher, samplers, store)


def facts_of(config: RunConfig, name: str, shape: ModelShape) -> Facts:
    """Clients on other machines fetch the tokenizer of a base of the hub by the hub's name."""
    tokenizer, longest = base_name(str(config.model.path)), config.model.max_length
    return Facts(name, tokenizer, longest, config.adapter.rank, longest < shape.max_positions)


def roomy(config: RunConfig, facts: Facts) -> RunConfig:
    """The config with engines that have room for a token after the longest sequence, if the model
    has."""
    model = config.model.model_copy(update={"max_length": facts.max_length + facts.scores_whole})
    return config.model_copy(update={"model": model})
