"""The run directory: what a run leaves behind, and what it is resumed from.

config.yaml      the resolved config; `lora-moe-rl train RUN/config.yaml --resume` goes on
settings.json    what settings it was trained with, since which step (settings_file.py)
versions.json    what packages, likewise (versions_file.py)
metrics.jsonl    one line a step, and one an evaluation
samples.jsonl    a few samples a step: prompt, response, reward, versions
tokens.jsonl     of the same samples every token, with logging.tokens
routes.jsonl     how often each expert of each layer was chosen, one line a step
eval/            samples of evaluations, a file each (eval_files.py)
order.jsonl      which groups each step trained, and the versions that sampled them
timeline.jsonl   who did what when, one line a step
checkpoints/     see checkpoint.py
adapter/         the newest exported PEFT adapter
owner.json       which run this is, where it has copies elsewhere (owner.py)
logs/            one file an actor, and one of what libraries say at their import
curves.png       reward, mismatch and step time, at the end
traces/          what trainer ranks computed in the steps of logging.profile (trainer/traces.py)
timeline.png     who did what when in the last steps, at the end; timeline.trace.json for Perfetto
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import read_config_file, to_yaml
from lora_moe_rl.config.recipes import CONFIG
from lora_moe_rl.data.kept import spread
from lora_moe_rl.data.samples import Group
from lora_moe_rl.data.update_result import TokenValues
from lora_moe_rl.errors import DiskWait, FileError, RunDirError
from lora_moe_rl.files.eval_files import EvalFiles
from lora_moe_rl.files.jsonl import cut_after, tail, to_json
from lora_moe_rl.files.out_directory import require_place
from lora_moe_rl.files.replacing import replace_file, sync
from lora_moe_rl.files.sample_records import routes_record, sample_record, token_record
from lora_moe_rl.files.trouble import Lines, Trouble, disk_wait
from lora_moe_rl.files.unchanged import check_unchanged

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 20
METRICS, ORDER = "metrics.jsonl", "order.jsonl"
SAMPLES, TOKENS, ROUTES = "samples.jsonl", "tokens.jsonl", "routes.jsonl"
TIMELINE, TIMELINE_PICTURE, TIMELINE_TRACE = (
    f"timeline.{end}" for end in ("jsonl", "png", "trace.json")
)


class RunDir:
    """The run directory of `config`, locked as long as the `with` block lasts.

    Raises RunDirError when it holds a run that is not to be resumed, when there is nothing to
    resume, when what cannot change has changed, or when another process is using it; DiskWait when
    the disk refuses what is to go on. What cannot be written later on waits (`trouble.py`), and
    `say` is told.
    """

    def __init__(
        self, config: RunConfig, resume: bool, say: Callable[[str], None] = log.warning
    ) -> None:
        self.config, self.resume = config, resume
        self.trouble = Trouble(say)
        self._to_resize = config.adapter.resize
        self._mark: tuple[int, int] | None = None  # of the lock, once it is held
        self._lines: dict[Path, Lines] = {}
        self.path = config.run_dir.absolute()
        self.evaluations = EvalFiles(self.path, self.trouble)
        self._lock_file = self.path / ".lock"
        self._lock = FileLock(self._lock_file)

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS

    @property
    def samples_file(self) -> Path:
        return self.path / SAMPLES

    @property
    def tokens_file(self) -> Path:
        return self.path / TOKENS

    @property
    def routes_file(self) -> Path:
        return self.path / ROUTES

    @property
    def order_file(self) -> Path:
        return self.path / ORDER

    @property
    def timeline_file(self) -> Path:
        return self.path / TIMELINE

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def curves_file(self) -> Path:
        return self.path / "curves.png"

    def __enter__(self) -> RunDir:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._mark = _inode(self._lock_file)
        except Timeout as error:
            raise RunDirError(
                f"{self.path} is in use by another run; wait for it to end, or choose another "
                f"directory with logging.run_dir=DIR"
            ) from error
        except OSError as error:
            raise self._refused(error) from error
        try:
            self._check_earlier_run()
            if not self.resume:  # else once it does go on: these settings may be refused
                self.write_config()
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(exist_ok=True)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise self._refused(error) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self.gone():
            for lines in self._lines.values():
                lines.close()
            self.evaluations.close()
        self._lock.release()

    def gone(self) -> bool:
        """Whether the directory that this run has locked is no longer at its path: it was deleted,
        moved, or another run has made a new one there. One that cannot be looked at is not: the
        disk is away, and comes back."""
        try:
            return self._mark is not None and _inode(self._lock_file) != self._mark
        except OSError:
            return False

    def check_there(self) -> None:
        """Raises RunDirError when it is gone: nothing is written into what may be another run's."""
        if self.gone():
            raise RunDirError(
                f"the run directory {self.path} was deleted, moved or replaced while the run went "
                "on, which ends here: what it has learned since its last checkpoint is lost. Put "
                "the directory back and go on with --resume, or begin anew"
            )

    def sync(self) -> None:
        """What was appended so far is on the disk when this returns, but for lines that wait.
        Raises OSError when the disk refuses."""
        for path in list(self._lines):
            if path.exists():
                sync(path)

    def append(self, path: Path, records: Sequence[dict[str, Any]]) -> None:
        """A line for each record, at the end of a file of this directory; those that the disk
        refuses wait for the next. Raises RunDirError when the directory is gone."""
        self.check_there()
        lines = self._lines.setdefault(path, Lines(path, self.trouble))
        lines.append("".join(to_json(record) + "\n" for record in records))

    @property
    def has_steps(self) -> bool:
        """Whether it holds a run. One that failed before its first step holds nothing: it may be
        started again."""
        if not self.config_file.exists():
            return False
        return any((_size(self.metrics_file), *self.checkpoints.glob("step-*")))

    def check_usable(self) -> None:
        """Raises RunDirError for a directory that a run refuses; nothing is made or locked."""
        if self.path.exists() and not self.path.is_dir():
            raise RunDirError(f"{self.path} is a file; choose a directory with logging.run_dir=DIR")
        if self.path.is_dir() or self.resume:
            self._check_earlier_run()
        try:
            require_place(self.path, "the run directory")
        except FileError as error:
            raise RunDirError(f"{error}; choose another with logging.run_dir=DIR") from error

    def _check_earlier_run(self) -> None:
        has_config = self.config_file.exists()
        if self.has_steps and not self.resume:
            raise RunDirError(
                f"{self.path} holds a run already; go on with it by --resume, or choose another "
                f"directory with logging.run_dir=DIR"
            )
        if not has_config and self.resume:
            raise RunDirError(
                f"there is no run in {self.path} to resume; leave out --resume, or name its "
                f"directory with logging.run_dir=DIR"
            )
        left = {".lock", f".{self.config_file.name}.tmp"}  # of one that was killed at its start
        if not has_config and any(path.name not in left for path in self.path.iterdir()):
            raise RunDirError(
                f"{self.path} is not empty and holds no run; choose another directory with "
                f"logging.run_dir=DIR"
            )
        if self.resume:
            check_unchanged(read_config_file(self.config_file), self.config, self.path)

    def log_path(self, actor: str) -> Path:
        """The log file of one actor (`trainer-0`, `engine-0`)."""
        return self.logs / f"{actor}.log"

    def tail(self, actor: str, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of an actor's log; '' when it wrote none."""
        return tail(self.log_path(actor), num_lines)

    def write_config(self) -> None:
        """What the run has, or goes on with. Raises RunDirError when the disk refuses, DiskWait of
        a run that goes on."""
        try:
            replace_file(self.config_file, to_yaml(self.config).encode())
        except OSError as error:
            raise self._refused(error) from error

    def resized(self) -> None:
        """A checkpoint has the ranks that adapter.resize was to bring: config.yaml asks for it no
        more, so that other ranks are an error again. Where the disk refuses it, the next checkpoint
        tries again."""
        if not self._to_resize:
            return
        adapter = self.config.adapter.model_copy(update={"resize": False})
        config = self.config.model_copy(update={"adapter": adapter})
        try:
            replace_file(self.config_file, to_yaml(config).encode())
        except OSError as error:
            self.trouble.failed(str(self.config_file), error.strerror or str(error))
        else:
            self._to_resize = False
            self.trouble.mended(str(self.config_file))

    def _refused(self, error: OSError) -> RunDirError | DiskWait:
        if self.resume:
            return disk_wait(self.path, error)
        return RunDirError(
            f"cannot use {self.path} as the run directory: {error.strerror or error}; choose "
            f"another with logging.run_dir=DIR"
        )

    def rewind(self, step: int) -> None:
        """Cuts what is written each step back to `step`, from which the run goes on. What is cut
        off is kept in `<file>.bak`."""
        for name in (METRICS, SAMPLES, TOKENS, ROUTES, ORDER, TIMELINE):
            cut_after(self.path / name, step)

    def write_timeline(self, record: dict[str, Any]) -> None:
        """Appends the spans of a step (telemetry/timeline.py)."""
        self.append(self.timeline_file, [record])

    def write_order(self, step: int, version: int, groups: Sequence[Group]) -> None:
        """Appends which prompts the step that updates `version` trains, in the order of the batch,
        each with the versions of its tokens and the length of its longest response: with the seeds,
        which are of the prompts' numbers, all that says what the step was made of."""
        order = [
            {
                "drawn": group.prompt.number,
                "versions": group.versions,
                "longest": max(len(sample.response_ids) for sample in group.samples),
            }
            for group in groups
        ]
        self.append(self.order_file, [{"step": step, "version": version, "groups": order}])

    def write_routes(self, step: int, layers: Sequence[int], loads: np.ndarray) -> None:
        """Appends how often the tokens of a step chose each expert: int64 [MoE layers, experts].
        `replay`: who chose, as `replay.mode` names it."""
        record = {"step": step, "replay": self.config.replay.mode, "layers": list(layers)}
        self.append(self.routes_file, [record | {"loads": loads.tolist()}])

    def write_samples(
        self,
        step: int,
        groups: Sequence[Group],
        signals: Sequence[Signal] | None,
        every: bool = False,
        values: Mapping[int, TokenValues] | None = None,
    ) -> list[dict[str, Any]]:
        """Appends `logging.samples_per_step` of the step's samples, or all, with their signals
        (None: there are none). `values`: what the trainer knew of tokens, by the sample's number
        in the step. Returns what was written."""
        samples = [(g, i) for g, group in enumerate(groups) for i in range(len(group.samples))]
        wanted = len(samples) if every else self.config.logging.samples_per_step
        records, tokens = [], []
        for chosen in spread(len(samples), wanted):
            g, i = samples[chosen]
            signal = signals[g] if signals is not None else None
            records.append({"sample": chosen} | sample_record(step, groups[g], signal, i))
            if self.config.learns_from == "answers":  # each is the one that is wanted
                del records[-1]["reward"]
            known = None if values is None else values.get(chosen)
            record = token_record(groups[g], signal, i, known)
            if self.config.logging.routes:
                record |= routes_record(groups[g], i)
            tokens.append({"step": step, "sample": chosen} | record)
        if self.config.logging.tokens:  # before the samples: who reads a sample finds its tokens
            self.append(self.tokens_file, tokens)
        self.append(self.samples_file, records)
        return records


def _inode(path: Path) -> tuple[int, int] | None:
    """What tells a file from another of the same name; None for one that is not there."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
