"""Checkpoints as they stand on the disk: `step-000012/`, complete, or none. `checkpoint_writing.py`
writes them; what is in one is its writer's business.

The manifest holds size and SHA-256 of every file and of itself. A directory that does not match its
manifest in every byte is no checkpoint; it is skipped by name and reason. What the manifest does
not name, and nobody would read, is left aside.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lora_moe_rl.errors import CheckpointError, DiskError, FileError
from lora_moe_rl.files.trouble import is_of_disk
from lora_moe_rl.files.untrusted import read_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
READ = ".safetensors"  # who reads a checkpoint takes all of these
READERS = 16  # files that are summed up at once
BAD_BLOCK = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}  # the file is lost, as when a byte is another
_STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint: its directory (None when there is none yet), what its writer
    put into `metadata`, and the newer ones that were skipped, with reasons."""

    path: Path | None
    metadata: dict[str, Any]
    skipped: list[tuple[Path, str]]


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turns what the disk refuses inside the block into a DiskError; trainer ranks that write their
    own files use it too."""
    try:
        yield
    except OSError as error:
        if not is_of_disk(error):
            raise
        reason = error.strerror or str(error)
        raise DiskError(
            f"cannot write the checkpoint {directory}: {reason}. The earlier checkpoints are "
            "untouched and stay valid: free some space",
            ", then go on with --resume",
        ) from error


def newest_valid(root: Path) -> Found:
    """The newest checkpoint whose every byte is as its manifest says.

    Raises CheckpointError when there are checkpoints, but none is valid, and OSError when they
    cannot be read: one that lies on a bad block is skipped only where an older one is valid, since
    a disk that is away may give that error for all of them.
    """
    skipped: list[tuple[Path, str]] = []
    unread: OSError | None = None
    for path in reversed(all_of(root)):
        try:
            metadata = read_manifest(path)
        except CheckpointError as error:
            skipped.append((path, str(error)))
        except OSError as error:
            if error.errno not in BAD_BLOCK:
                raise
            unread = unread or error
            skipped.append((path, f"it cannot be read: {error}"))
        else:
            return Found(path, metadata, skipped)
    if unread is not None:
        raise unread
    if skipped:
        reasons = "\n".join(f"  {path}: {reason}" for path, reason in skipped)
        raise CheckpointError(
            f"no checkpoint in {root} is valid:\n{reasons}\n"
            f"To start over, use another logging.run_dir"
        )
    return Found(None, {}, [])


def newest_step(root: Path) -> int:
    """The step of the newest checkpoint by its name, valid or not; 0 when there is none."""
    paths = all_of(root)
    return step_of(paths[-1]) if paths else 0


def read_manifest(path: Path) -> dict[str, Any]:
    """The metadata of the checkpoint `path`, after every file was verified.

    Raises CheckpointError with the first thing that is wrong.
    """
    manifest = parse_manifest(path)
    if path.name != directory_name(manifest["step"]):
        raise CheckpointError(f"the manifest is of step {manifest['step']}")
    for name in manifest["files"]:
        check_name(name)
    present = {name for name in plain_files(path) if name != MANIFEST}
    for name in sorted(set(manifest["files"]) - present):
        raise CheckpointError(f"{name} is missing")
    for name in sorted(present - set(manifest["files"])):
        if name.endswith(READ):
            raise CheckpointError(f"{name} is not in the manifest")
        log.warning("%s: %s is not in the manifest, and not read", path, name)
    for name, expected in manifest["files"].items():
        size = (path / name).stat().st_size
        if size != expected["size"]:
            raise CheckpointError(f"{name} has {size} bytes instead of {expected['size']}")
    _check_sums(path, {name: entry["sha256"] for name, entry in manifest["files"].items()})
    return manifest["metadata"]


def _check_sums(path: Path, expected: Mapping[str, str]) -> None:
    """Raises CheckpointError with the first of these files, by name, whose SHA-256 is another.
    Several are read at once: hashing holds no lock, and one reader is not all that a disk of many
    gives."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint") as readers:
        found = readers.map(lambda name: sha256_of(path / name), expected)
        try:
            for (name, sum_), its in zip(expected.items(), found, strict=True):
                if its != sum_:
                    raise CheckpointError(f"{name} is corrupt: its SHA-256 differs")
        finally:
            readers.shutdown(cancel_futures=True)


def parse_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).exists():
        raise CheckpointError(f"{MANIFEST} is missing")
    try:
        manifest = read_json(path / MANIFEST)
        same = manifest.pop("sha256", None) == digest_of(manifest)
    except (FileError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error
    if not same:
        raise CheckpointError(f"{MANIFEST} is corrupt: its SHA-256 differs")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST} has format {manifest.get('format')}, known is {FORMAT}")
    for key, kind in (("step", int), ("files", dict), ("metadata", dict)):
        if type(manifest.get(key)) is not kind:
            raise CheckpointError(f"{MANIFEST} has no {key} as this program writes it")
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not {"size", "sha256"} <= entry.keys():
            raise CheckpointError(f"{MANIFEST} does not give size and SHA-256 of {name}")
    return manifest


def check_name(name: str) -> None:
    """Raises CheckpointError for a file that is not plainly inside the checkpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise CheckpointError(f"{name!r} in the manifest is not a path inside the checkpoint")


def plain_files(folder: Path) -> list[str]:
    """Names relative to `folder`, without hidden files: those are of systems and editors, which put
    them anywhere. Raises CheckpointError for a link: its target may change."""
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in PurePosixPath(name).parts):
            continue
        if path.is_symlink():
            raise CheckpointError(f"{name} is a link; a checkpoint holds plain files")
        if path.is_file():
            names.append(name)
    return names


def all_of(root: Path) -> list[Path]:
    """The checkpoints by their names, valid or not, oldest first. Raises OSError where they cannot
    be looked for: that there are none is another thing."""
    try:
        return sorted(filter(is_named, root.iterdir()), key=step_of)
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_named(path: Path) -> bool:
    """Whether a directory has the name of a checkpoint."""
    return _STEP_NAME.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its directory's name."""
    return int(path.name.removeprefix("step-"))


def directory_name(step: int) -> str:
    return f"step-{step:06d}"


def files_of(path: Path) -> dict[str, Any]:
    """{name of each file that the manifest names: its size and SHA-256}; nothing else is looked at.
    Raises CheckpointError for a manifest that is none, and for a name that leads elsewhere."""
    found = parse_manifest(path)["files"]
    for name in found:
        check_name(name)
    return found


def digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
