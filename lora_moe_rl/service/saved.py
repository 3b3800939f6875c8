"""Checkpoints of a service's models: DIRECTORY/step-000000, as a run's checkpoints are, with the
client's LoRA in the metadata. `lora-moe-rl export` and `adapter` read them too."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from lora_moe_rl.adapters import peft
from lora_moe_rl.errors import CheckpointError, ServiceError
from lora_moe_rl.files import checkpoint
from lora_moe_rl.files.checkpoint_tensors import CheckpointTensors
from lora_moe_rl.files.checkpoint_writing import write_checkpoint
from lora_moe_rl.files.saving import FileSum
from lora_moe_rl.service.backend import Lora
from lora_moe_rl.service.loras import Cut, Places

if TYPE_CHECKING:
    from lora_moe_rl.cluster.service_ranks import ServiceRanks

STEP, KEY = 0, "lora"


def write(
    directory: Path, lora: Lora, ranks: ServiceRanks, places: Places, base: dict[str, Any]
) -> Path:
    """Writes what the ranks hold. Returns the checkpoint. Raises DiskError."""
    files: dict[str, FileSum] = {}
    adapter = places.saved(lora)
    metadata: dict[str, Any] = {"step": STEP, "adapter": adapter, "base": base, KEY: asdict(lora)}
    with write_checkpoint(directory, STEP, metadata, files) as scratch:
        found = ranks.save(scratch)
        metadata["trainer"] = found.meta
        files |= found.files
    return directory / checkpoint.directory_name(STEP)


class Read(NamedTuple):
    """The client's LoRA, the checkpoint, what the trainer's ranks read it by, and its SHA-256."""

    lora: Lora
    path: Path
    meta: dict[str, Any]
    digest: str


def read(directory: Path, places: Places, base: dict[str, Any]) -> Read:
    """Once its files are verified. Raises ServiceError for one that this service cannot hold."""
    path = directory / checkpoint.directory_name(STEP)
    try:
        metadata = checkpoint.read_manifest(path)
    except CheckpointError as error:
        raise ServiceError(f"{directory.name} is no whole checkpoint: {error}") from error
    if KEY not in metadata:
        raise ServiceError(f"{directory.name} is not a checkpoint of a training service")
    lora = Lora(**metadata[KEY])
    places.check(lora)
    if metadata["base"]["fingerprint"] != base["fingerprint"]:
        raise ServiceError(f"{directory.name} is of another base than this service has")
    if metadata["adapter"] != places.saved(lora):
        raise ServiceError(
            f"{directory.name} was saved by a service whose section adapter is another: start this "
            "one with the same"
        )
    return Read(lora, path, metadata["trainer"], digest_of(path))


def digest_of(path: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which has those of its files."""
    return checkpoint.sha256_of(path / checkpoint.MANIFEST)


def export(
    directory: Path, lora: Lora, ranks: ServiceRanks, places: Places, base: dict[str, Any]
) -> None:
    """Writes a PEFT adapter of the model's own ranks."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix=".export-") as scratch:
        path = write(Path(scratch), lora, ranks, places, base)
        with CheckpointTensors(path, places.spec) as tensors:
            spec = places.exported(lora)
            peft.write(directory, spec, Cut(tensors, spec), places.config)
