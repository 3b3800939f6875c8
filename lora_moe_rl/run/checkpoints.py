"""Checkpoints of a run: when they are due, what goes into one, and the adapter beside them.

    a step's end ──> ranks write their state ──> sealed ──> the next update
                                                   └──> adapter/ and copies, beside the next steps

Files are written in threads, so that engines, rewards and agents are answered meanwhile. The
trainer waits until its state is in a checkpoint; the PEFT directory is made of that checkpoint's
own files, layer by layer.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from lora_moe_rl import algorithms
from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.in_thread import in_thread
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import CheckpointError, DiskError
from lora_moe_rl.export import chat_template
from lora_moe_rl.files.checkpoint import directory_name, disk_errors
from lora_moe_rl.files.checkpoint_tensors import CheckpointTensors
from lora_moe_rl.files.checkpoint_writing import prune, write_checkpoint
from lora_moe_rl.files.retention import Retention
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.files.saving import FileSum
from lora_moe_rl.files.trainer_state import CRITIC, file_name
from lora_moe_rl.files.trouble import SAY_EVERY_S
from lora_moe_rl.models.fingerprint import base_record
from lora_moe_rl.ports import Trainer
from lora_moe_rl.telemetry import console

CHECKPOINT, ADAPTER = "a checkpoint", "the adapter"
OLD = "kept.json, or remove old checkpoints"
# The run's last checkpoint has what it learned since the one before: so long it waits for room.
LAST_ROOM_S, LAST_RETRY_S = 3600.0, 10.0

T = TypeVar("T")


class Checkpoints:
    """A context manager: on leaving it waits for what is being written, unless the run is ended at
    once.

    `newest`: the step of the newest, which the run has gone on from or written; 0 without one. What
    is in the directory besides may be damaged.

    Once a checkpoint and the adapter beside it are there, `written` is told of both, and `told` of
    the step and the adapter: in a thread, until whose end no other adapter takes its place.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        trainer: Trainer,
        told: Callable[[int, Path], None],
        written: Callable[[Path, Path], None],
        newest: int = 0,
    ):
        self.newest = newest
        self.config, self.spec, self.run_dir, self.trainer = config, spec, run_dir, trainer
        self.base = base_record(config.model.path, model_dir, config.model.revision)
        self.frozen: str | None = None  # digest of what is measured against; start.py gives it
        self._told, self._written = told, written
        self._overdue = False  # a checkpoint that the disk refused
        self._exporting: asyncio.Task[None] | None = None
        self._newer = False  # takes the place of an adapter that the disk refuses
        self._ends_at: float | None = None  # until when the last adapter waits for room
        self._woken = asyncio.Event()
        self._busy = threading.Lock()  # held while a thread writes

    @cached_property
    def retention(self) -> Retention:
        return Retention(self.config.checkpoint, self.run_dir.metrics_file, console.warn)

    def is_due(self, step: int, last: bool) -> bool:
        """Whether the step has one: by checkpoint.every, as the run's last, or because the disk has
        refused one."""
        every = self.config.checkpoint.every
        due = last or (every > 0 and step % every == 0)
        return due or (self._overdue and self.run_dir.trouble.due(CHECKPOINT))

    async def write(
        self,
        step: int,
        book: dict[str, Any],
        last: Callable[[], bool],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Writes one: adapter, moments, counters and tickets, complete or not at all. `book` is the
        ticket book's state; the trainer has to stay as it is until this returns. The adapter's PEFT
        directory follows in a task of `tasks`.

        Where the disk refuses, the run goes on from what is there, and tries again after a step, a
        minute later; what is the `last` one by then it waits for, LAST_ROOM_S at most.
        """
        book = copy.deepcopy(book)  # as it is now: tickets and prompts go on meanwhile
        await self._take_the_place()
        trouble, deadline = self.run_dir.trouble, time.monotonic() + LAST_ROOM_S
        self._overdue = True
        while True:
            try:
                path = await self._in_thread("checkpoint", lambda: self._write(step, book))
                break
            except DiskError as error:
                trouble.failed(CHECKPOINT, f"{error.fault}; it is tried again each minute")
                if not last():
                    return
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(LAST_RETRY_S)
        self._overdue, self.newest = False, step
        trouble.mended(CHECKPOINT)
        await self._prune(step)
        self._exporting = tasks.create_task(self._export(step, path))

    def _write(self, step: int, book: dict[str, Any]) -> Path:
        metadata: dict[str, Any] = {
            "step": step,
            **book,
            "adapter": self.config.adapter.model_dump(mode="json"),
            "base": self.base,
        }
        if self.frozen is not None:
            metadata["reference"] = self.frozen
        self.run_dir.check_there()
        root, files = self.run_dir.checkpoints, dict[str, FileSum]()
        with write_checkpoint(root, step, metadata, files) as directory:
            self.run_dir.sync()
            saved = self.trainer.save(directory)
            if missing := self._expected - saved.files.keys():
                raise CheckpointError(f"trainer ranks have not written {', '.join(missing)}")
            metadata["trainer"] = saved.meta
            files |= saved.files
        self.run_dir.resized()
        return root / directory_name(step)

    @property
    def _expected(self) -> set[str]:
        """Files of the ranks."""
        ranks = range(self.config.trainer.world_size)
        names = {file_name(rank) for rank in ranks}
        if algorithms.make(self.config).critic is not None:
            names |= {file_name(rank, CRITIC) for rank in ranks}
        return names

    async def _prune(self, step: int) -> None:
        """What the disk refuses here costs room and nothing else: the next one tries again."""
        kept = (self.config.checkpoint.keep, self.retention)
        try:
            await self._in_thread("prune", lambda: prune(self.run_dir.checkpoints, step, *kept))
        except DiskError as error:
            self.run_dir.trouble.failed(OLD, str(error))
        else:
            self.run_dir.trouble.mended(OLD)

    async def _export(self, step: int, path: Path) -> None:
        """Writes the adapter of the checkpoint `path`, and tells of both. Where the disk refuses it
        is tried again, until a newer one takes its place, or for LAST_ROOM_S after the run's last
        step."""
        trouble = self.run_dir.trouble
        while True:
            try:
                await self._in_thread("adapter", lambda: self._write_adapter(path))
                break
            except DiskError as error:
                trouble.failed(ADAPTER, f"{error}; it is tried again each minute")
                if self._ends_at is not None and time.monotonic() >= self._ends_at:
                    raise
            if self._newer or await self._paused():
                return
        trouble.mended(ADAPTER)
        await self._in_thread("copies", lambda: self._tell(step, path))

    def _tell(self, step: int, path: Path) -> None:
        self._told(step, self.run_dir.adapter)
        self._written(path, self.run_dir.adapter)

    def _write_adapter(self, path: Path) -> None:
        self.run_dir.check_there()
        with (
            disk_errors(self.run_dir.adapter),
            CheckpointTensors(path, self.spec) as tensors,
        ):
            beside = chat_template.beside(self.config.model.chat_template)
            parts, of_base = (self.spec, tensors, self.config), self.base["fingerprint"]
            peft.write(self.run_dir.adapter, *parts, beside=beside, base=of_base)

    async def _paused(self) -> bool:
        """Waits until it is time to try again. Returns whether a newer one is there meanwhile."""
        self._woken.clear()
        with suppress(TimeoutError):
            seconds = SAY_EVERY_S if self._ends_at is None else LAST_RETRY_S
            await asyncio.wait_for(self._woken.wait(), seconds)
        return self._newer

    async def _take_the_place(self) -> None:
        """Waits until nothing is written any more of the one before."""
        self._newer = True
        await self._exported()
        self._newer = False

    async def _exported(self) -> None:
        self._woken.set()
        if self._exporting is not None:
            await asyncio.wait([self._exporting])

    async def finish(self) -> None:
        """The run ends: returns when its last adapter is there. What that raises is raised by the
        tasks of the run."""
        self._ends_at = time.monotonic() + LAST_ROOM_S
        await self._exported()

    async def judge(self, step: int) -> None:
        """Which checkpoints stay, by a metric of evaluations: that of the newest, of `step`, comes
        after it."""
        settings = self.config.checkpoint
        if settings.keep_best and settings.best_of_evaluations:
            await self._prune(step)

    async def _in_thread(self, name: str, call: Callable[[], T]) -> T:
        def alone() -> T:
            with self._busy:
                return call()

        return await in_thread(name, alone)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, Exception):
            with self._busy:
                pass
