"""Checkpoints by name, in one directory.

    ROOT/MODEL/run.json             the model: its base, its adapters, what its maker says about it
    ROOT/MODEL/KIND/NAME            tinker://MODEL/KIND/NAME, with .NAME.json about it beside
    ROOT/MODEL/.incoming            one that is being written
    ROOT/MODEL/.gone-…              one that is being deleted

All that is listed is read from here, so that it outlives the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lora_moe_rl.errors import ServiceError
from lora_moe_rl.files.replacing import put_in_place, replace_file
from lora_moe_rl.service.backend import Lora
from lora_moe_rl.service.place import KINDS, WEIGHTS, Place, safe_name

INCOMING, FRESH, GONE = ".incoming", "fresh", ".gone-"


@dataclass(frozen=True)
class Run:
    """A model, as it was made. `created` is in seconds since 1970."""

    model: str
    base_model: str
    lora: Lora
    created: float
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A checkpoint. `created` and `expires` are in seconds since 1970; None: it stays."""

    place: Place
    base_model: str
    lora: Lora
    created: float
    expires: float | None = None
    size_bytes: int = 0
    user_metadata: dict[str, str] = field(default_factory=dict)


class Folders:
    """`clock`: seconds since 1970. Written by one process at a time; what one that was killed has
    left half done is tidied up."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time):
        self.root, self.clock = root, clock
        self._readers: dict[Place, set[asyncio.Event]] = {}
        self._changing = threading.Lock()  # which checkpoints there are, and who reads them
        root.mkdir(parents=True, exist_ok=True)
        self._tidy()

    def add(self, run: Run) -> None:
        folder = self.root / safe_name(run.model, "the model")
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "run.json", asdict(run))

    def touch(self, model: str) -> None:
        """Something was asked of this model."""
        now = self.clock()
        with suppress(FileNotFoundError):  # somebody has tidied up
            os.utime(self.root / model / "run.json", (now, now))

    def last_asked(self, model: str) -> float:
        return (self.root / model / "run.json").stat().st_mtime

    def runs(self) -> list[Run]:
        """Newest first."""
        found = [_run(path) for path in self.root.glob("*/run.json")]
        return sorted(found, key=lambda run: run.created, reverse=True)

    def run(self, model: str) -> Run:
        """Raises ServiceError for a model that was never here."""
        path = self.root / safe_name(model, "the model") / "run.json"
        if not path.exists():
            raise ServiceError(f"there is no training run {model} here")
        return _run(path)

    def directory(self, place: Place) -> Path:
        return self.root / place.model / place.kind / place.name

    def files(self, place: Place) -> list[str]:
        """Paths within its directory."""
        directory = self.directory(place)
        found = (path for path in directory.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(directory)) for path in found)

    def check_free(self, place: Place, overwrite: bool) -> None:
        """Raises ServiceError when a checkpoint is there and is to stay."""
        if not overwrite and self._saved(place) is not None:
            way = "; overwrite=True replaces it" if place.kind == WEIGHTS else ""
            raise ServiceError(f"{place.path} is there already: take another name{way}")

    async def write(self, saved: Saved, fill: Callable[[Path], Awaitable[None]]) -> Saved:
        """`fill` writes the directory it is given; what had the place before is there until it has.
        Returns `saved` with its size."""
        incoming = self.root / saved.place.model / INCOMING
        fresh, old = incoming / FRESH / saved.place.name, incoming / saved.place.id
        await asyncio.to_thread(shutil.rmtree, incoming, ignore_errors=True)
        fresh.parent.mkdir(parents=True)
        old.parent.mkdir()
        try:
            await fill(fresh)
            while readers := self._readers.get(saved.place):
                await next(iter(readers)).wait()
            return self._put_in_place(saved, fresh, old)
        finally:
            await asyncio.to_thread(shutil.rmtree, incoming, ignore_errors=True)

    def _put_in_place(self, saved: Saved, fresh: Path, old: Path) -> Saved:
        final = self.directory(saved.place)
        with self._changing:
            final.parent.mkdir(exist_ok=True)
            put_in_place(fresh, final, old)
            sizes = [(final / file).stat().st_size for file in self.files(saved.place)]
            saved = replace(saved, size_bytes=sum(sizes))
            _write(self._about(saved.place), asdict(saved))
        return saved

    @contextmanager
    def reading(self, place: Place) -> Iterator[Path]:
        """Its directory, which neither goes nor changes meanwhile. Raises ServiceError for a
        checkpoint that is not there."""
        over = asyncio.Event()
        self.find(place)
        with self._changing:
            if not self._about(place).exists():
                raise _not_there(place)
            readers = self._readers.setdefault(place, set())
            readers.add(over)
        try:
            yield self.directory(place)
        finally:
            over.set()
            readers.discard(over)
            if not readers:
                del self._readers[place]

    def find(self, place: Place) -> Saved:
        """Raises ServiceError for a checkpoint that is not there, or no more."""
        saved = self._saved(place)
        if saved is None:
            raise _not_there(place)
        return saved

    def of(self, model: str) -> list[Saved]:
        """Checkpoints of a model, newest first."""
        places = [
            Place(model, kind, about.name[1 : -len(".json")])
            for kind in KINDS
            for about in (self.root / safe_name(model, "the model") / kind).glob(".*.json")
        ]
        found = [saved for place in places if (saved := self._saved(place)) is not None]
        return sorted(found, key=lambda saved: saved.created, reverse=True)

    def all(self) -> list[Saved]:
        """Checkpoints of all models, newest first."""
        found = [saved for run in self.runs() for saved in self.of(run.model)]
        return sorted(found, key=lambda saved: saved.created, reverse=True)

    def sweep(self) -> None:
        """Deletes what has expired, which reading does."""
        self.all()

    def delete(self, place: Place) -> None:
        """Raises ServiceError for one that is being read."""
        with self._changing:
            if place in self._readers:
                raise ServiceError(f"{place.path} is being loaded: delete it when that is done")
            gone = self._gone(place)
        shutil.rmtree(gone, ignore_errors=True)

    def _gone(self, place: Place) -> Path:
        """It is there no more, but for the files in the directory that is returned."""
        gone = self.root / place.model / f"{GONE}{uuid.uuid4()}"
        self._about(place).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self.directory(place).rename(gone)
        return gone

    def keep_for(self, place: Place, ttl_seconds: int | None) -> None:
        """Sets how long a checkpoint is kept from now on; None: for ever. Raises ServiceError for a
        checkpoint that is not there."""
        expires = None if ttl_seconds is None else self.clock() + ttl_seconds
        self.find(place)
        with self._changing:
            if (saved := self._told(place)) is None:
                raise _not_there(place)
            _write(self._about(place), asdict(replace(saved, expires=expires)))

    def _tidy(self) -> None:
        for kind in KINDS:  # what was to be replaced, where names cannot be exchanged
            for old in self.root.glob(f"*/{INCOMING}/{kind}/*"):
                final = old.parents[2] / kind / old.name
                if not final.exists():
                    old.rename(final)
        for left in [*self.root.glob(f"*/{INCOMING}"), *self.root.glob(f"*/{GONE}*")]:
            shutil.rmtree(left, ignore_errors=True)

    def _about(self, place: Place) -> Path:
        return self.directory(place).with_name(f".{place.name}.json")

    def _saved(self, place: Place) -> Saved | None:
        """None where there is none; one that has expired is deleted, once nobody reads it."""
        if (saved := self._told(place)) is None or not self._expired(saved):
            return saved
        gone = None
        with self._changing:  # it may just have been written anew
            if (saved := self._told(place)) is not None and not self._expired(saved):
                return saved
            if place not in self._readers:
                gone = self._gone(place)
        if gone is not None:
            shutil.rmtree(gone, ignore_errors=True)
        return None

    def _expired(self, saved: Saved) -> bool:
        return saved.expires is not None and saved.expires <= self.clock()

    def _told(self, place: Place) -> Saved | None:
        try:
            told = json.loads(self._about(place).read_bytes())
        except FileNotFoundError:
            return None
        told["place"], told["lora"] = Place(**told["place"]), Lora(**told["lora"])
        return Saved(**told)


def _not_there(place: Place) -> ServiceError:
    return ServiceError(f"there is no checkpoint {place.path} here, or it has expired")


def _run(path: Path) -> Run:
    told = json.loads(path.read_bytes())
    told["lora"] = Lora(**told["lora"])
    return Run(**told)


def _write(path: Path, content: dict[str, object]) -> None:
    replace_file(path, json.dumps(content, indent=1).encode())
