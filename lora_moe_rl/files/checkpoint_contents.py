"""What stands in a checkpoint beside its files' names and sums: looked at before anything uses it.

A manifest that matches its files byte by byte may still have been written by somebody else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_moe_rl.errors import CheckpointError, FileError
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.trainer_state import BEGAN, CRITIC, KINDS, POLICY, files, parse
from lora_moe_rl.files.untrusted import Entry, SafeFile


class _Read(BaseModel):
    model_config = ConfigDict(strict=True)


class _Base(_Read):
    path: str
    revision: str | None = None
    config: dict[str, Any]
    fingerprint: str


class _OfAdapter(_Read):
    adapter: dict[str, Any]
    base: _Base


class _Trainer(_Read):
    version: int = Field(ge=0)
    optimizer_steps: int = Field(ge=0)
    scheduled_steps: int | None = Field(None, ge=0)
    critic_steps: int | None = Field(None, ge=0)
    critic_scheduled_steps: int | None = Field(None, ge=0)
    updates_per_step: int | None = Field(None, ge=1)


class _OfRun(_OfAdapter):
    step: int = Field(ge=0)
    trainer: _Trainer
    data: dict[str, Any]
    done: list[int] = []
    reference: str | None = None
    kl_coef: float | None = None


def check_adapter(path: Path, metadata: dict[str, Any]) -> None:
    """Raises CheckpointError unless the metadata say what adapter it is, and of which base."""
    _check(path, metadata, _OfAdapter)


def check_resumable(found: Found) -> None:
    """Raises CheckpointError unless a run can go on from the checkpoint: all that one needs is in
    its metadata, and its tensors are of a trainer's state. Reads headers alone."""
    assert found.path is not None
    _check(found.path, found.metadata, _OfRun)
    for path in [*files(found.path, POLICY), *files(found.path, CRITIC)]:
        try:
            file = SafeFile.open(path)
        except FileError as error:
            raise CheckpointError(str(error)) from error
        for entry in file.entries.values():
            slice_of(entry)


def slice_of(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
    """(kind, tensor or site, start) of a slice in a file. Raises CheckpointError for what is no
    slice, and for one of another dtype or number of dimensions than its kind has."""
    kind, name, start = parse(entry.name)
    dtype = "I64" if kind == BEGAN else "F32"
    if kind not in KINDS or entry.dtype != dtype or len(start) != len(entry.shape):
        raise CheckpointError(
            f"{entry.name} is {entry.dtype} of shape {entry.shape}, which is no slice of "
            f"{', '.join(KINDS)}"
        )
    if kind == BEGAN and entry.shape != (1,):
        raise CheckpointError(f"{entry.name} has the shape {entry.shape}: it is one number")
    return kind, name, start


def _check(path: Path, metadata: dict[str, Any], kind: type[BaseModel]) -> None:
    try:
        kind.model_validate(metadata)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"checkpoint {path} does not hold what a run writes: {where}: {first['msg']}"
        ) from error
