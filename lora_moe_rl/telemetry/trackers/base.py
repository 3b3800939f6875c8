"""What a tracker is: it takes a record of metrics a step, and one an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lora_moe_rl.config import RunConfig, TrackerConfig
from lora_moe_rl.config.plugins import Plugin
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.upstream.versions import importable


class ProjectConfig(TrackerConfig):
    """Settings that mean the same for all trackers with projects: chosen together, they share
    them."""

    project: str = Field("lora_moe_rl", description="Project, or experiment, of the tracker.")
    run: str | None = Field(None, description="The run's name there; null: the run directory's.")
    adapters: bool = Field(
        False, description="Send the adapter too, each time that a checkpoint is written."
    )


class Tracker(Plugin):
    """Base of all trackers. One is made when the run starts, and again when it is resumed. It is
    made in the run's own thread; all else is called in another, in order and one call at a time, so
    that it may take its time.

    `config` is the run's, `settings` its section `tracker`, `run_dir` where the run writes. Raises
    ConfigError, before anything slow starts, for what a user can get wrong. `packages` is what pip
    installs for it, `modules` what of these it imports.
    """

    Settings: ClassVar[type[TrackerConfig]] = TrackerConfig
    packages: ClassVar[tuple[str, ...]] = ()
    modules: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: TrackerConfig, config: RunConfig, run_dir: Path):
        raise NotImplementedError

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes the numbers of one step, or of an evaluation (`eval/*`) of what a step has made;
        NaN and infinity may be among them. With schedule.lag an evaluation comes some steps after
        its own; a run that is resumed may make steps again that an earlier one was given."""
        raise NotImplementedError

    def details(self, step: int, details: Details) -> None:
        """Takes samples and distributions of a step whose numbers it was given. A tracker without a
        place for them leaves it."""

    @property
    def wants_adapters(self) -> bool:
        """Whether `adapter` is called."""
        return type(self).adapter is not Tracker.adapter

    def adapter(self, step: int, directory: Path) -> None:
        """Takes the adapter, a PEFT directory, when a checkpoint was written. The directory is gone
        once this returns: it has to be sent by then. What is raised is counted and said, and costs
        this adapter alone."""

    def close(self, failed: bool) -> None:
        """Told when the run is over; `failed` is True when an error ended it. The run waits for it,
        tracker.end_timeout_s at most."""

    @classmethod
    def check_installed(cls) -> None:
        """Raises ConfigError for a package that is not there; imports none of `modules`, but what
        they are in."""
        for module in cls.modules:
            if not importable(module):
                raise cls.missing(ImportError(name=module))

    @classmethod
    def missing(cls, error: ImportError) -> ConfigError:
        """What to raise when a package that it needs cannot be imported."""
        return ConfigError(
            f"tracker.name names {cls.__name__.lower()}, and {error.name or error} is not "
            f"installed: pip install {' '.join(map(repr, cls.packages))}"
        )


class ProjectTracker(Tracker):
    """The settings that trackers with projects have in common."""

    settings: ProjectConfig

    @property
    def wants_adapters(self) -> bool:
        return self.settings.adapters
