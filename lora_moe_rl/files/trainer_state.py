"""How a trainer's state stands on disk: slices of canonical tensors, so that any layout reads it.

Each rank writes one safetensors file with the slices it owns, and one more with those of the
critic, if there is one. The key of a slice says of what it
is, which tensor it is part of and where it lies: `adapter|layers.0.q_proj.A|0,0`. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_moe_rl.errors import CheckpointError
from lora_moe_rl.files.saving import FileSum

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's
# Of canonical tensors, and of sites: at which of the optimizer's steps Adam began, int64 `[1]`; not
# there for a site whose moments are as old as the run's.
BEGAN = "began"
KINDS = ("adapter", *MOMENTS, BEGAN)
Whose = Literal["trainer", "critic"]
POLICY: Whose = "trainer"
CRITIC: Whose = "critic"
_DONE: dict[Whose, tuple[str, str]] = {
    POLICY: ("optimizer_steps", "scheduled_steps"),
    CRITIC: ("critic_steps", "critic_scheduled_steps"),
}
_UPDATES = "updates_per_step"


@dataclass(frozen=True)
class Saved:
    """What a rank has written, or all of them. `meta`: what the manifest has to hold besides, to
    load it; `files`: by name, on the disk."""

    meta: dict[str, int]
    files: dict[str, FileSum]


@dataclass(frozen=True)
class Done:
    """Steps of an optimizer: `steps` were applied, and its learning rate counts `scheduled`: those
    without a token in the loss too, and others in a run that went on with more or fewer optimizer
    steps a step."""

    steps: int
    scheduled: int

    def as_meta(self, whose: Whose, updates: int) -> dict[str, int]:
        """What a state's `meta` holds of it. `updates`: optimizer steps of a step of the run."""
        steps, scheduled = _DONE[whose]
        return {steps: self.steps, scheduled: self.scheduled, _UPDATES: updates}

    @classmethod
    def of(cls, meta: Mapping[str, int], whose: Whose, updates: int) -> Done:
        """What `meta` says was done, in a run whose steps make `updates` optimizer steps: its
        learning rate goes on at the same share of the run."""
        steps, scheduled = _DONE[whose]
        done = meta.get(steps, 0)
        return cls(done, meta.get(scheduled, done) * updates // meta.get(_UPDATES, updates))


def file_name(number: int, whose: Whose = POLICY) -> str:
    return f"{whose}_{number:05d}.safetensors"


def files(directory: Path, whose: Whose = POLICY) -> list[Path]:
    """The files in the order of the ranks that wrote them."""
    return sorted(directory.glob(f"{whose}_*.safetensors"))


def key(kind: str, name: str, start: tuple[int, ...]) -> str:
    return f"{kind}|{name}|{','.join(map(str, start))}"


def parse(text: str) -> tuple[str, str, tuple[int, ...]]:
    """(kind, tensor or site, start) of a key. Raises CheckpointError for what is none."""
    try:
        kind, name, start = text.split("|")
        return kind, name, tuple(int(x) for x in start.split(","))
    except ValueError:
        example = key("adapter", "layers.0.q_proj.A", (0, 0))
        raise CheckpointError(
            f"{text!r} is no slice of a trainer's state: keys are like {example}"
        ) from None
