"""A directory that trainer and engines share, for engines elsewhere.

    <directory>/v000012/part-00003.safetensors   of trainer rank 3: written, synced, renamed
    <directory>/v000012/manifest.json            last: without it the version is not there

The manifest names every file with its size and the checksums of its tensors. It is untrusted: a
file that it names outside its folder is refused. The directory belongs to one run.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.parts import Entry, PartLayout, SentPart, host_memory, version_checksum

MANIFEST = "manifest.json"
FORMAT = 1
FILE_NAME = re.compile(r"part-\d{5,}\.safetensors")
FOLDER_NAME = re.compile(r"v\d{6,}")

log = logging.getLogger(__name__)


class Channel(transports.Channel):
    parts_last = True
    warned = False

    @property
    def directory(self) -> str:
        assert self.settings.directory is not None  # the config sees to it
        return self.settings.directory

    def outgoing(self, layout: PartLayout, host: str) -> Outgoing:
        return Outgoing(self.directory, layout)

    def incoming(self, rank: int) -> Incoming:
        return Incoming(self.directory, rank)

    async def published(self, parts: Callable[[], Awaitable[Sequence[SentPart]]]) -> None:
        publish(self.directory, await parts())

    def keep(self, versions: Iterable[int]) -> None:
        left = keep_only(self.directory, versions)
        if left and not self.warned:
            self.warned = True
            log.warning("%s stays: it holds files that are no adapter's", left[0])


class Outgoing:
    """Writes one rank's parts."""

    def __init__(self, directory: str, layout: PartLayout):
        self.root, self.layout = Path(directory), layout
        self.offered: SentPart | None = None

    def memory(self, nbytes: int, device: torch.device) -> np.ndarray:
        self.buffer = host_memory(nbytes)
        return self.buffer

    def offer(self, sent: SentPart) -> SentPart:
        if sent != self.offered:  # of a version that a skipped update left as it was, all is there
            self._write(sent, self.buffer)
            self.offered = sent
        return replace(sent, path=f"{_folder(sent.version)}/{_file(sent.source)}")

    def _write(self, sent: SentPart, buffer: np.ndarray) -> None:
        folder = self.root / _folder(sent.version)
        file = folder / _file(sent.source)
        whole = torch.from_numpy(buffer).view(getattr(torch, self.layout.dtype))
        tensors = {_name(entry): entry.view(whole) for entry in self.layout.entries}
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MANIFEST).unlink(missing_ok=True)  # of an earlier run that came further
            scratch = file.with_suffix(".tmp")
            save_file(tensors, scratch)
            _move(scratch, file)


class Incoming:
    """Reads what one engine worker needs of each part."""

    def __init__(self, directory: str, rank: int):
        self.root, self.rank = Path(directory), rank

    def open(self, layout: PartLayout, sent: SentPart) -> np.ndarray:
        published = {part.source: part for part in read_manifest(self.root, sent.version)}
        if published.get(sent.source) != replace(sent, checksums=tuple(sent.checksums)):
            raise RefitError(
                f"{self.root / _folder(sent.version) / MANIFEST} does not tell of the part that "
                f"trainer rank {sent.source} has sent; does another run write there?"
            )
        buffer = np.empty(layout.nbytes, dtype=np.uint8)
        whole = torch.from_numpy(buffer).view(getattr(torch, layout.dtype))
        path = self.root / sent.path
        try:
            with safe_open(path, framework="pt") as file:
                for entry in layout.entries:
                    if self.rank in entry.targets:
                        target = entry.view(whole)
                        values = file.get_tensor(_name(entry))
                        if (values.shape, values.dtype) != (target.shape, target.dtype):
                            raise RefitError(
                                f"{path}: {_name(entry)} is {tuple(values.shape)} {values.dtype} "
                                f"instead of {tuple(target.shape)} {target.dtype}"
                            )
                        target.copy_(values)
        except (OSError, SafetensorError) as error:
            raise RefitError(f"cannot read an adapter from {path}: {error}") from error
        return buffer


def publish(directory: str | Path, sent: Sequence[SentPart]) -> None:
    """Writes the manifest of a version whose parts are all there."""
    (version,) = {part.version for part in sent}
    folder = Path(directory) / _folder(version)
    with _disk_errors(folder):
        parts = [
            {
                "source": part.source,
                "file": Path(part.path).name,
                "file_bytes": (folder / Path(part.path).name).stat().st_size,
                "bytes": part.nbytes,
                "checksums": part.checksums,
            }
            for part in sorted(sent, key=lambda part: part.source)
        ]
        manifest = {
            "format": FORMAT,
            "version": version,
            "checksum": version_checksum(sent),
            "parts": parts,
        }
        scratch = folder / "manifest.tmp"
        scratch.write_text(json.dumps(manifest))
        _move(scratch, folder / MANIFEST)


def read_manifest(directory: str | Path, version: int) -> list[SentPart]:
    """The parts of a version. Raises RefitError unless it was published whole: the manifest is
    there and agrees with itself, and every file is there in its size."""
    folder = Path(directory) / _folder(version)
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        if manifest["format"] != FORMAT or manifest["version"] != version:
            raise RefitError(f"{path} is of version {manifest['version']}, not {version}")
        sent = [_read_part(folder, version, part) for part in manifest["parts"]]
        if manifest["checksum"] != version_checksum(sent):
            raise RefitError(f"{path} is damaged: its checksum is not that of its parts")
        return sent
    except FileNotFoundError as error:
        raise RefitError(
            f"adapter version {version} is not published in {directory}: there is no "
            f"{error.filename}"
        ) from error
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise RefitError(f"{path} cannot be read: {error!r}") from error


def keep_only(directory: str | Path, versions: Iterable[int]) -> list[Path]:
    """Removes all other versions. Of each, the manifest goes first. Returns the folders that stay,
    since they hold files of somebody else."""
    kept, left = {_folder(version) for version in versions}, []
    root = Path(directory)
    with _disk_errors(root, "remove an adapter from"):
        for folder in root.iterdir():
            if FOLDER_NAME.fullmatch(folder.name) and folder.name not in kept and folder.is_dir():
                (folder / MANIFEST).unlink(missing_ok=True)
                for path in [*folder.glob("part-*.safetensors"), *folder.glob("*.tmp")]:
                    path.unlink()
                rest = list(folder.iterdir())
                if not rest:
                    folder.rmdir()
                # NFS keeps a file that is still open as .nfs*; it goes when its reader does.
                elif not all(path.name.startswith(".nfs") for path in rest):
                    left.append(folder)
    return left


def _read_part(folder: Path, version: int, fields: dict[str, Any]) -> SentPart:
    name = fields["file"]
    if not FILE_NAME.fullmatch(name):
        raise RefitError(f"{folder / MANIFEST} names the file {name!r}, which is not a part")
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise RefitError(f"{file} leads out of {folder}")
    if (size := file.stat().st_size) != fields["file_bytes"]:
        raise RefitError(f"{file} has {size} bytes instead of {fields['file_bytes']}")
    return SentPart(
        fields["source"],
        version,
        f"{folder.name}/{name}",
        fields["bytes"],
        tuple(fields["checksums"]),
    )


def _folder(version: int) -> str:
    return f"v{version:06d}"


def _file(source: int) -> str:
    return f"part-{source:05d}.safetensors"


def _name(entry: Entry) -> str:
    """A tensor may be cut into several boxes."""
    return f"{entry.tensor}@{','.join(map(str, entry.box.start))}"


def _move(scratch: Path, final: Path) -> None:
    """Once its bytes are on the disk."""
    for path, then in ((scratch, scratch.rename), (final.parent, None)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if then:
            then(final)


@contextmanager
def _disk_errors(path: Path, deed: str = "write an adapter to") -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RefitError(f"cannot {deed} {path} (refit.directory): {error}") from error
