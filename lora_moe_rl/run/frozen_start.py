"""The adapter that a run is measured against with algorithm.reference=start: found again whenever
the run goes on, or ranks are started anew, and the same as at its start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import LoraMoeRlError, RunDirError
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.run import adapter_start
from lora_moe_rl.run.adapter_start import Start
from lora_moe_rl.telemetry import console

if TYPE_CHECKING:
    import numpy as np

    from lora_moe_rl.run.preflight import Preflight

WAYS_OUT = (
    "put it back as it was, name where it is now (adapter.init_from=DIR), or measure against the "
    "base from now on (algorithm.reference=base)"
)
KEY = "reference"  # of a checkpoint's metadata: the fingerprint of the start


class FrozenStart:
    """`digest`: of what adapter.init_from held when the run began."""

    def __init__(self, config: RunConfig, spec: AdapterSpec, model_dir: Path, start: Start):
        self._parts, self.digest = (config, spec, model_dir), start.digest
        self._tensors: dict[str, np.ndarray] | None = start.tensors

    @classmethod
    def of_run(
        cls, ready: Preflight, start: Start | None, found: Found | None
    ) -> FrozenStart | None:
        """`start`: what the run begins with, if it does; `found`: the checkpoint that it goes on
        from. None where the run is not measured against its start. Raises RunDirError for another
        adapter than the checkpoint was measured against, for none, and for other ranks."""
        config, spec = ready.config, ready.spec
        if not algorithms.make(config).from_start:
            return None
        if found is not None and adapter_start.other_ranks(found, config, spec) is not None:
            raise RunDirError(
                f"{found.path} has other ranks than this run, and with algorithm.reference=start "
                "the adapter that it is measured against would be changed to them as well: keep "
                "its ranks, or start a run of its own from it with adapter.init_from"
            )
        if found is not None and found.metadata.get(KEY) is not None:
            config = _fitting(config)
        parts = config, spec, ready.model_dir
        start = start or _read(*parts)
        if found is not None:
            _check_against(found, config, start)
        return cls(*parts, start)

    def read(self) -> dict[str, np.ndarray]:
        """Whole canonical tensors at the run's ranks. Raises RunDirError when they are not those of
        its start any more."""
        tensors, self._tensors = self._tensors, None
        if tensors is not None:
            return tensors
        start = _read(*self._parts)
        _check(self._parts[0], start.digest, self.digest, "the run began")
        return start.tensors


def _fitting(config: RunConfig) -> RunConfig:
    """With adapter.resize, which config.yaml asks for no more once a checkpoint has the run's
    ranks: the start is brought to them as it was when the run began."""
    adapter = config.adapter.model_copy(update={"resize": True})
    return config.model_copy(update={"adapter": adapter})


def _read(config: RunConfig, spec: AdapterSpec, model_dir: Path) -> Start:
    try:
        return adapter_start.init_from(config, spec, model_dir)
    except LoraMoeRlError as error:
        raise RunDirError(
            f"algorithm.reference=start measures the policy against adapter.init_from="
            f"{config.adapter.init_from}, and that cannot be read: {error}; {WAYS_OUT}"
        ) from error


def _check_against(found: Found, config: RunConfig, start: Start) -> None:
    """A checkpoint of a run that was measured against its base knows no start."""
    known = found.metadata.get(KEY)
    if known is not None:
        _check(config, start.digest, known, f"{found.path} was written")
        return
    console.say_notes(
        [
            f"until {found.path} the run was not measured against a start; from here on it is "
            f"against adapter.init_from={config.adapter.init_from}"
        ]
    )


def _check(config: RunConfig, digest: str, known: str, when: str) -> None:
    if digest != known:
        raise RunDirError(
            f"adapter.init_from={config.adapter.init_from} holds another adapter (fingerprint "
            f"{digest}) than when {when} ({known}), and with algorithm.reference=start the policy "
            f"is measured against it; {WAYS_OUT}"
        )
