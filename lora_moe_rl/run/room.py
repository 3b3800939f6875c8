"""What a run's checkpoints take on the disk, and what is free: known before anything starts."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.peft import form_of, peft_shapes
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError, DiskWait
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.files.trouble import waited_for

GIB = 1 << 30
# A number of the adapter with Adam's two moments, in float32; one of the PEFT directory, where
# there may be many more of them (`adapters/peft.py`).
STATE_BYTES, PEFT_BYTES = 12, 4


@dataclass(frozen=True)
class Room:
    """Bytes: of a checkpoint, of the PEFT directory beside them, and free at `place`. `most`:
    checkpoints that there may be at once when the run is whole, the one being written included."""

    checkpoint: int
    adapter: int
    free: int
    place: Path
    most: int

    @property
    def first(self) -> int:
        """The bytes of one checkpoint and the adapter."""
        return self.checkpoint + self.adapter

    @property
    def whole(self) -> int:
        """The most bytes of the whole run: an adapter is replaced by one that is complete."""
        return self.most * self.checkpoint + 2 * self.adapter

    @property
    def text(self) -> str:
        return (
            f"a checkpoint has {self.checkpoint / GIB:.3g} GiB and the adapter "
            f"{self.adapter / GIB:.3g} GiB; up to {self.most} checkpoints with adapters have "
            f"{self.whole / GIB:.3g} GiB; {self.free / GIB:.1f} GiB free at {self.place}"
        )


def room(config: RunConfig, spec: AdapterSpec) -> Room:
    place = config.run_dir.absolute()
    while not place.exists():
        place = place.parent
    state = spec.num_parameters
    if algorithms.make(config).critic is not None:
        state += spec.of_critic().num_parameters + spec.shape.hidden_size
    written = peft_shapes(spec, form_of(spec.shape, None))
    exported = sum(math.prod(shape) for shape in written.values())
    return Room(
        state * STATE_BYTES,
        exported * PEFT_BYTES,
        shutil.disk_usage(place).free,
        place,
        _most(config),
    )


def check_room(config: RunConfig, spec: AdapterSpec) -> tuple[str, list[str]]:
    """(what there is, warnings). Raises ConfigError when not one checkpoint has room, DiskWait
    where a run is to go on, RunDirError where nothing can be written."""
    goes_on = RunDir(config, resume=True).has_steps
    with waited_for(config.run_dir, goes_on):
        found = room(config, spec)
    if found.first > found.free:
        if not goes_on:
            RunDir(config, resume=False).check_usable()
        kind = DiskWait if goes_on else ConfigError
        raise kind(
            f"the disk has no room for one checkpoint: {found.text}; free some space, or set "
            "logging.run_dir"
        )
    if found.whole > found.free:
        return found.text, [
            f"the disk may be full before the run is done: {found.text} (checkpoint.keep, "
            "keep_hours, keep_best, logging.run_dir)"
        ]
    return found.text, []


def _most(config: RunConfig) -> int:
    """One more than are kept: a new one is whole before an old one goes. How many are younger than
    checkpoint.keep_hours is not known before: it may be all."""
    settings = config.checkpoint
    written = config.trainer.steps // settings.every if settings.every else 0
    written += not settings.every or bool(config.trainer.steps % settings.every)
    kept = settings.keep + settings.keep_best
    kept += settings.push_to is not None  # one that is being copied
    return written if settings.keep_hours is not None else min(written, kept + 1)
