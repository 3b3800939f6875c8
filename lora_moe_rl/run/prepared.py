"""What a run is made of before anything slow has started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lora_moe_rl import ports
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run import adapter_start
from lora_moe_rl.run.frozen_start import FrozenStart
from lora_moe_rl.run.preflight import Preflight


@dataclass(frozen=True)
class Prepared:
    """What a run is made of before anything slow has started. `found` is the checkpoint to go on
    from, `start` the adapter to begin with; None when there is none;
    `frozen` what it is measured against, None when that is the base. `private`: why trainer and
    engines hold a base each; '' when they hold one. `connect`: called in the run's event loop, lets
    a reward ask the engines; None when none does."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    source: ports.Prompts
    held_out: dict[str, list[Prompt]]
    environment: Environment
    run_dir: RunDir
    private: str
    found: Found | None = None
    start: adapter_start.Start | None = None
    frozen: FrozenStart | None = None
    connect: Callable[[ports.Engines], None] | None = None

    @classmethod
    def of(
        cls,
        ready: Preflight,
        run_dir: RunDir,
        found: Found | None,
        start: adapter_start.Start | None,
        frozen: FrozenStart | None,
    ) -> Prepared:
        """What a preflight that found nothing wrong has prepared."""
        return cls(
            config=ready.config,
            spec=ready.spec,
            model_dir=ready.model_dir,
            source=ready.source,
            held_out=ready.held_out,
            environment=ready.environment,
            run_dir=run_dir,
            private=ready.private,
            found=found,
            start=start,
            frozen=frozen,
            connect=_connecting(ready),
        )

    @property
    def resumed(self) -> bool:
        """Whether the run directory is the one of before, and not of a fork."""
        return self.run_dir.resume

    @property
    def step(self) -> int:
        """The step that the run goes on from."""
        return self.found.metadata["step"] if self.found else 0


def _connecting(ready: Preflight) -> Callable[[ports.Engines], None] | None:
    server = ready.own_engines
    if server is None:
        return None
    longest = ready.config.model.max_length
    return lambda engines: server.connect(engines.write, ready.tokenizer, longest)
