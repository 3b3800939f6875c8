"""The directory of a merge: finished shards are kept, nothing unfinished looks whole.

.merge.json                what is being merged, and what is finished: size and checksum
NAME.partial               the shard that is being written
NAME                       a finished shard
tokenizer, generation_config.json, …, index, config.json      last, in this order
merge.json                 replaces .merge.json at the very end
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_moe_rl.errors import ExportError, FileError
from lora_moe_rl.export import chat_template
from lora_moe_rl.files.out_directory import require_empty
from lora_moe_rl.files.untrusted import PICKLES, inside, read_json

JOURNAL, RECORD = ".merge.json", "merge.json"
INDEX = "model.safetensors.index.json"
PARTIAL = ".partial"
# Of a base, and of no other model: its card, and an adapter that lies beside its weights.
_ITS_OWN = ("README.md", "adapter_config.json")
Files = Mapping[str, str | None]
_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", *PICKLES)


class OutDirectory:
    """`fingerprint` tells one merge from another. Its lock goes with the process."""

    def __init__(self, path: Path, fingerprint: dict[str, str]):
        self.path, self.fingerprint = path, fingerprint
        self.done: dict[str, dict[str, Any]] = {}  # {shard: {"digest", "arrived"}}

    @classmethod
    @contextmanager
    def open(cls, path: Path, fingerprint: dict[str, str]) -> Iterator[OutDirectory]:
        """An empty directory, a new one, or the unfinished one of the same merge. Raises
        ExportError for any other, for one in use and when the disk refuses."""
        out = cls(path, fingerprint)
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ExportError(f"{path} is being written by another process") from None
            with disk_errors(path):
                out._begin()
            yield out
        finally:
            os.close(lock)

    def _begin(self) -> None:
        found = sorted(one.name for one in self.path.iterdir())
        if JOURNAL not in found:
            if found:
                raise ExportError(
                    f"{self.path} is not empty (it holds {', '.join(found[:3])}): name another "
                    "directory"
                )
            self._write_journal()
            return
        try:
            journal = read_json(inside(self.path, JOURNAL))
        except FileError as error:
            raise ExportError(
                f"{self.path} has an unreadable {JOURNAL}; remove it all: {error}"
            ) from error
        kept = journal.get("fingerprint")
        if kept != self.fingerprint:
            old = kept if isinstance(kept, dict) else {}
            differ = [key for key, value in self.fingerprint.items() if old.get(key) != value]
            others = " and another ".join(differ)
            raise ExportError(
                f"{self.path} holds an unfinished result of another {others}: "
                "remove it, or name another directory"
            )
        self.done = journal["done"]
        for one in self.path.glob(f"*{PARTIAL}"):
            one.unlink()

    def require_space(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if nbytes > free:
            raise ExportError(
                f"{self.path} needs {nbytes / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} "
                "GB free: free some space, or name a directory on another disk"
            )

    def forget(self, name: str) -> None:
        """A shard that is not as it was written."""
        del self.done[name]
        self._write_journal()

    def finish_shard(self, name: str, digest: str, arrived: dict[str, dict[str, float]]) -> None:
        os.replace(self.path / f"{name}{PARTIAL}", self.path / name)
        self.done[name] = {"digest": digest, "arrived": arrived}
        self._write_journal()

    def finish(
        self,
        base: Path,
        config: dict[str, Any] | None,
        weight_map: dict[str, str],
        record: dict,
        own: Files,
    ) -> None:
        """All other files. `config`: its new content, or None to copy the base's. `own`: files in
        the place of the base's by their text, None for one that is left out."""
        with disk_errors(self.path):
            for name in _rest(base):
                to = self.path / name
                if name not in own:
                    to.parent.mkdir(exist_ok=True)
                    _copy(inside(base, name), to)
            for name, text in own.items():
                if text is not None:
                    _write_text(self.path / name, text)
            if (base / INDEX).exists():
                total = sum(os.path.getsize(self.path / name) for name in self.done)
                _write_json(
                    self.path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
                )
            _write_json(self.path / RECORD, record)
            if config is None:
                _copy(inside(base, "config.json"), self.path / "config.json")
            else:
                _write_json(self.path / "config.json", config)
            (self.path / JOURNAL).unlink()
            _sync_directory(self.path)

    def _write_journal(self) -> None:
        _write_json(self.path / JOURNAL, {"fingerprint": self.fingerprint, "done": self.done})


def _rest(base: Path) -> list[str]:
    """Names of the files to copy. Of directories a checkpoint has its templates alone; others hold
    the weights in other formats, as `original` and `metal`."""
    paths = [one for one in base.iterdir() if _is_copied(one)]
    paths += (base / chat_template.MORE).glob("*.jinja")
    return sorted(str(one.relative_to(base)) for one in paths)


def _is_copied(path: Path) -> bool:
    name = path.name
    hidden = name.startswith(".") or name in ("config.json", RECORD, *_ITS_OWN)
    return not hidden and not path.is_dir() and not name.removesuffix(".index.json").endswith(
        _WEIGHTS
    )  # fmt: skip


def check_rest(base: Path) -> None:
    """Raises FileError for a file beside the weights that cannot be copied, as a link out of the
    directory: before any weight is."""
    for name in _rest(base):
        inside(base, name)


def check_out(path: Path) -> None:
    """Raises FileError for a place that nothing can be written to, as far as that can be said
    before it is known what. An unfinished result may be there."""
    if not (path / JOURNAL).is_file():
        require_empty(path)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the disk refuses becomes an ExportError."""
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"cannot write {path}: {error.strerror or error}. It is not a whole checkpoint; the "
            "same command goes on with the shards that are finished"
        ) from error


def _copy(source: Path, target: Path) -> None:
    def write(file) -> None:
        with open(source, "rb") as original:
            shutil.copyfileobj(original, file)

    _write(target, write)


def _write_json(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    _write(path, lambda file: file.write(text.encode()))


def _write(path: Path, write) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f"{path.name}{PARTIAL}")
    try:
        with open(fresh, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
