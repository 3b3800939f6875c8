"""How a checkpoint gets to disk: complete, or not at all. What is in it is the writer's business.

    tmp-000012-<pid>/  files, each fsynced  ->  manifest.json last  ->  rename to  step-000012/

The manifest holds size and SHA-256 of every file and of itself. A directory that does not match its
manifest in every byte is no checkpoint; it is skipped by name and reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from lora_moe_rl.errors import CheckpointError, DiskError, FileError
from lora_moe_rl.files.untrusted import read_json

MANIFEST = "manifest.json"
FORMAT = 1
LATE_FILE_S = 60.0  # longer than network file systems remember what is not there
KEPT = "kept.json"
_STEP_NAME = re.compile(r"step-(\d{6,})")


# Of all checkpoints of the run's course, oldest first: {one that stays: why}.
Also = Callable[[Sequence[Path]], Mapping[Path, str]]


def _none(paths: Sequence[Path]) -> Mapping[Path, str]:
    return {}


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint: its directory (None when there is none yet), what its writer
    put into `metadata`, and the newer ones that were skipped, with reasons."""

    path: Path | None
    metadata: dict[str, Any]
    skipped: list[tuple[Path, str]]


@contextmanager
def write_checkpoint(
    root: Path,
    step: int,
    keep: int,
    metadata: dict[str, Any],
    expect: Sequence[str] = (),
    also: Also = _none,
) -> Iterator[Path]:
    """Yields a directory to write files into; on leaving, they become `root/step-<step>`.

    `metadata` (JSON) and `expect` are read on leaving, so they may be filled meanwhile. `expect`
    names the files that other processes say they have written: one that is not seen here (a network
    file system may show it late) is an error, not a checkpoint without it. After that only the
    newest `keep` checkpoints stay, and those that `also` names, which `kept.json` then explains.

    Raises DiskError when the disk refuses and CheckpointError when a file is missing; whatever is
    raised, by the body too, nothing of this checkpoint stays and the earlier ones are as they were.
    """
    scratch = root / f"tmp-{step:06d}-{os.getpid()}"
    try:
        with disk_errors(scratch):
            root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(root)
            scratch.mkdir()
            yield scratch
            _check_expected(scratch, expect)
            _seal(scratch, step, metadata)
            _move_into_place(scratch, _directory(root, step))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    with disk_errors(root):
        _prune(root, step, keep, also)


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turns what the disk refuses inside the block into a DiskError; trainer ranks that write their
    own files use it too."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise  # OSErrors too, but not the disk's
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DiskError(
            f"cannot write the checkpoint {directory}: {reason}. The earlier checkpoints are "
            f"untouched and stay valid: free some space, then go on with --resume"
        ) from error


def newest_valid(root: Path) -> Found:
    """The newest checkpoint whose every byte is as its manifest says.

    Raises CheckpointError when there are checkpoints, but none is valid.
    """
    skipped = []
    for path in reversed(all_of(root)):
        try:
            metadata = read_manifest(path)
        except CheckpointError as error:
            skipped.append((path, str(error)))
        else:
            return Found(path, metadata, skipped)
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


def adopt(root: Path, path: Path) -> None:
    """Copies the checkpoint `path` of another run into `root`, complete or not at all. Raises
    CheckpointError when it is none, and when the disk refuses."""
    step = _parse_manifest(path)["step"]
    scratch = root / f"tmp-{step:06d}-{os.getpid()}"
    try:
        with disk_errors(scratch):
            shutil.copytree(path, scratch, symlinks=True)
            for name in [*_files(scratch), "."]:
                _fsync(scratch / name)
            _move_into_place(scratch, _directory(root, step))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The metadata of the checkpoint `path`, after every file was verified.

    Raises CheckpointError with the first thing that is wrong.
    """
    manifest = _parse_manifest(path)
    if path.name != _directory(path.parent, manifest["step"]).name:
        raise CheckpointError(f"the manifest is of step {manifest['step']}")
    for name in manifest["files"]:
        _check_name(name)
    present = {name for name in _files(path) if name != MANIFEST}
    for name in sorted(present ^ set(manifest["files"])):
        what = "is not in the manifest" if name in present else "is missing"
        raise CheckpointError(f"{name} {what}")
    for name, expected in manifest["files"].items():
        size = (path / name).stat().st_size
        if size != expected["size"]:
            raise CheckpointError(f"{name} has {size} bytes instead of {expected['size']}")
        if _sha256(path / name) != expected["sha256"]:
            raise CheckpointError(f"{name} is corrupt: its SHA-256 differs")
    return manifest["metadata"]


def remove_leftovers(root: Path) -> None:
    """Removes what writers that died have left. Only for the one process that writes to `root`."""
    for path in root.glob("tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_expected(scratch: Path, expect: Sequence[str]) -> None:
    deadline = time.monotonic() + LATE_FILE_S
    while missing := sorted(set(expect) - set(_files(scratch))):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"cannot write the checkpoint {scratch}: {', '.join(missing)} was written by its "
                f"rank and is not there {LATE_FILE_S:g} s later; do all nodes see the same "
                f"directory (logging.run_dir)? The earlier checkpoints are untouched"
            )
        time.sleep(0.1)


def _seal(scratch: Path, step: int, metadata: dict[str, Any]) -> None:
    files = {}
    for name in _files(scratch):
        _check_name(name)
        _fsync(scratch / name)
        files[name] = {
            "size": (scratch / name).stat().st_size,
            "sha256": _sha256(scratch / name),
        }
    manifest = {"format": FORMAT, "step": step, "files": files, "metadata": metadata}
    manifest = json.loads(json.dumps(manifest))  # as it will be read: lists, text keys
    manifest["sha256"] = _digest(manifest)
    with open(scratch / MANIFEST, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder in [scratch, *(path for path in scratch.rglob("*") if path.is_dir())]:
        _fsync(folder)


def _move_into_place(scratch: Path, final: Path) -> None:
    if final.exists():
        # A run that skipped it as invalid, and has come to the same step again.
        _remove(final)
    os.rename(scratch, final)
    _fsync(final.parent)


def _prune(root: Path, step: int, keep: int, also: Also) -> None:
    """Keeps the newest `keep` up to `step`, and of the others those that `also` names. Later ones
    were skipped as invalid when this run was resumed, and are of a course that it left."""
    paths = all_of(root)
    course = [path for path in paths if step_of(path) <= step]
    why = also(course)
    kept = {*course[-keep:], *why}
    for path in paths:
        if path not in kept:
            _remove(path)
    if why:
        reasons = {path.name: reason for path, reason in why.items()}
        (root / KEPT).write_text(json.dumps(reasons, indent=1) + "\n")


def _remove(path: Path) -> None:
    # Renamed first: a directory named step-* is always whole.
    grave = path.with_name(f"tmp-old-{path.name}")
    os.rename(path, grave)
    shutil.rmtree(grave, ignore_errors=True)


def _parse_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).exists():
        raise CheckpointError(f"{MANIFEST} is missing")
    try:
        manifest = read_json(path / MANIFEST)
        same = manifest.pop("sha256", None) == _digest(manifest)
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


def _check_name(name: str) -> None:
    """Raises CheckpointError for a file that is not plainly inside the checkpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise CheckpointError(f"{name!r} in the manifest is not a path inside the checkpoint")


def _files(folder: Path) -> list[str]:
    """Names relative to `folder`. Raises CheckpointError for a link: its target may change."""
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise CheckpointError(f"{name} is a link; a checkpoint holds plain files")
        if path.is_file():
            names.append(name)
    return names


def all_of(root: Path) -> list[Path]:
    """The checkpoints by their names, valid or not, oldest first."""
    paths = [path for path in root.glob("step-*") if _STEP_NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """Of a checkpoint's directory, by its name."""
    return int(path.name.removeprefix("step-"))


def directory_name(step: int) -> str:
    return f"step-{step:06d}"


def files_of(path: Path) -> dict[str, Any]:
    """{name of each file that the manifest names: its size and SHA-256}; nothing else is looked at.
    Raises CheckpointError for a manifest that is none, and for a name that leads elsewhere."""
    found = _parse_manifest(path)["files"]
    for name in found:
        _check_name(name)
    return found


def _directory(root: Path, step: int) -> Path:
    return root / directory_name(step)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
