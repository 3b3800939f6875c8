"""How a checkpoint gets to the disk: complete, or not at all.

    tmp-000012-<pid>/  files, on the disk  ->  manifest.json last  ->  rename to  step-000012/

Who writes a large file sums it up while it does (`saving.py`), and the manifest takes its word: no
file is read once more here but those that nobody has summed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_moe_rl.errors import CheckpointError
from lora_moe_rl.files.checkpoint import (
    FORMAT,
    MANIFEST,
    all_of,
    check_name,
    digest_of,
    directory_name,
    disk_errors,
    parse_manifest,
    plain_files,
    sha256_of,
    step_of,
)
from lora_moe_rl.files.replacing import put_in_place, replace_file, sync
from lora_moe_rl.files.saving import FileSum

LATE_FILE_S = 60.0  # longer than network file systems remember what is not there
KEPT = "kept.json"

# Of all checkpoints of the run's course, oldest first: {one that stays: why}.
Also = Callable[[Sequence[Path]], Mapping[Path, str]]


def _none(paths: Sequence[Path]) -> Mapping[Path, str]:
    return {}


@contextmanager
def write_checkpoint(
    root: Path,
    step: int,
    metadata: dict[str, Any],
    written: Mapping[str, FileSum] | None = None,
) -> Iterator[Path]:
    """Yields a directory to write files into; on leaving, they become `root/step-<step>`.

    `metadata` (JSON) and `written` are read on leaving, so they may be filled meanwhile. `written`
    are files that other processes say they have written, and have on the disk: one that is not seen
    here in its size (a network file system may show it late) is an error, not a checkpoint without
    it.

    Raises DiskError when the disk refuses and CheckpointError when a file is missing; whatever is
    raised, by the body too, nothing of this checkpoint stays and the earlier ones are as they were.
    """
    scratch = _scratch(root, step)
    try:
        with disk_errors(scratch):
            root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(root)
            scratch.mkdir()
            yield scratch
            _seal(scratch, step, metadata, written or {})
            _move_into_place(scratch, root, step)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def prune(root: Path, step: int, keep: int, also: Also = _none) -> None:
    """Once `step` is written: only the newest `keep` checkpoints up to it stay, and of the others
    those that `also` names, which `kept.json` explains. Later ones were skipped as invalid when
    this run was resumed, and are of a course that it left. Raises DiskError."""
    with disk_errors(root):
        paths = all_of(root)
        course = [path for path in paths if step_of(path) <= step]
        why = also(course)
        kept = {*course[-keep:], *why}
        for path in paths:
            if path not in kept:
                grave = _grave(root, step_of(path))
                os.rename(path, grave)
                shutil.rmtree(grave, ignore_errors=True)
        if why:
            reasons = {path.name: reason for path, reason in why.items()}
            replace_file(root / KEPT, (json.dumps(reasons, indent=1) + "\n").encode())
        else:  # what an earlier life of the run kept, it had its reasons for
            (root / KEPT).unlink(missing_ok=True)


def adopt(root: Path, path: Path) -> None:
    """Copies the checkpoint `path` of another run into `root`, complete or not at all. Raises
    CheckpointError when it is none, and when the disk refuses."""
    step = parse_manifest(path)["step"]
    scratch = _scratch(root, step)
    try:
        with disk_errors(scratch):
            shutil.copytree(path, scratch, symlinks=True)
            for name in [*plain_files(scratch), "."]:
                sync(scratch / name)
            _move_into_place(scratch, root, step)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Removes what writers that died have left. Only for the one process that writes to `root`."""
    for path in root.glob("tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _scratch(root: Path, step: int) -> Path:
    return root / f"tmp-{step:06d}-{os.getpid()}"


def _grave(root: Path, step: int) -> Path:
    """Where a checkpoint is removed: a directory named step-* is always whole."""
    return root / f"tmp-old-{directory_name(step)}"


def _seal(
    scratch: Path, step: int, metadata: dict[str, Any], written: Mapping[str, FileSum]
) -> None:
    _wait_for(scratch, written)
    files = {}
    for name in plain_files(scratch):
        check_name(name)
        files[name] = (written.get(name) or _summed(scratch / name)).as_json()
    manifest = {"format": FORMAT, "step": step, "files": files, "metadata": metadata}
    manifest = json.loads(json.dumps(manifest))  # as it will be read: lists, text keys
    manifest["sha256"] = digest_of(manifest)
    with open(scratch / MANIFEST, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder in [scratch, *(path for path in scratch.rglob("*") if path.is_dir())]:
        sync(folder)


def _wait_for(scratch: Path, written: Mapping[str, FileSum]) -> None:
    deadline = time.monotonic() + LATE_FILE_S
    while late := sorted(
        name for name, one in written.items() if _size(scratch / name) != one.size
    ):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"cannot write the checkpoint {scratch}: {', '.join(late)} was written by its "
                f"rank and is not there, or not whole, {LATE_FILE_S:g} s later; do all nodes see "
                f"the same directory (logging.run_dir)? The earlier checkpoints are untouched"
            )
        time.sleep(0.1)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _summed(path: Path) -> FileSum:
    sync(path)
    return FileSum(path.stat().st_size, sha256_of(path))


def _move_into_place(scratch: Path, root: Path, step: int) -> None:
    """Moves a checkpoint to its place, and into that of one that a run has skipped as invalid, if
    it has come to its step again."""
    grave = _grave(root, step)
    put_in_place(scratch, root / directory_name(step), grave)
    shutil.rmtree(grave, ignore_errors=True)
