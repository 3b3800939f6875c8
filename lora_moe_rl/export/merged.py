"""An adapter merged into its base, as a stream: a complete Hugging Face checkpoint.

    plan (headers alone) -> each shard: pread rows, W + scale * B A, pwrite -> all other files

Each shard of the base is read once and each of the result written once, a few rows at a time, by a
few threads. An interrupted merge goes on: finished shards are compared with their checksums and
kept. What no adapter changes is copied bit for bit. A quantised base is written as numbers in the
same way, without an adapter.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.errors import ExportError
from lora_moe_rl.export import merged_targets
from lora_moe_rl.export.merged_adapter import Adapter
from lora_moe_rl.export.merged_out import (
    PARTIAL,
    RECORD,
    Files,
    OutDirectory,
    check_rest,
    disk_errors,
)
from lora_moe_rl.export.merged_plan import CopyStep, MergeStep, ShardPlan, plan_renamed, plan_shards
from lora_moe_rl.export.merged_weights import Dtype, Form, check_form, compute
from lora_moe_rl.files.untrusted import SafeFile, SafeWeights, inside, read_json
from lora_moe_rl.kernels.merge.rounding import Arrived

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MOST_WORKERS = 4
FORMAT = "2"  # of the result; an unfinished merge of another one is not gone on with
BASES_OWN = Form()
NO_FILES: Files = MappingProxyType({})
Say = Callable[[str], None]


@dataclass
class MergeReport:
    """`arrived`: what rounding left of the adapter's change, by changed tensor. `bytes_written`
    are of shards that were written, not of those found finished."""

    directory: Path
    shards: int = 0
    kept_shards: int = 0
    changed_tensors: int = 0
    bytes_written: int = 0
    arrived: dict[str, Arrived] = field(default_factory=dict)

    @property
    def total(self) -> Arrived:
        total = Arrived()
        for one in self.arrived.values():
            total.add(one)
        return total


def export_merged(
    spec: AdapterSpec,
    tensors: Mapping[str, np.ndarray],
    base_dir: Path | str,
    out_dir: Path | str,
    form: Form = BASES_OWN,
    say: Say | None = None,
    stop_lost: float = math.inf,
    own: Files = NO_FILES,
) -> MergeReport:
    """Writes `out_dir`. `tensors`: canonical, read one layer at a time and not kept, so that a lazy
    mapping keeps memory small. `own`: files in the place of the base's (`OutDirectory.finish`).

    Raises AdapterError for tensors that are not the spec's, ExportError for a base that does not
    fit them or the form, for an output directory that is in the way, a disk that refuses, and when
    rounding lost more than `stop_lost` of the change (`Arrived.lost`; nothing that loads is there
    then), FileError for a damaged base.
    """
    base_dir, say = Path(base_dir), say or (lambda text: None)
    config = read_json(inside(base_dir, "config.json"))
    with SafeWeights.open(base_dir) as base:
        stored = merged_targets.find(base, config, spec, DTYPES[form.dtype] if form.dtype else None)
        target = "float32" if form.adapted_float32 else form.dtype
        shards = plan_shards(base, stored, DTYPES[target] if target else None)
        check_form(form, stored, shards)
        say("reading the adapter")
        adapter = Adapter(spec, tensors)
        changed = sum(1 for weight in stored.values() if weight.parts)
        new_config = None if target is None else _config_of(config, target)
        planned = _Planned(base, shards, adapter, form, new_config, own)
        return _write(planned, MergeReport(Path(out_dir), len(shards), 0, changed), say, stop_lost)


def dequantise(
    base_dir: Path | str, out_dir: Path | str, dtype: Dtype = "bfloat16", say: Say | None = None
) -> MergeReport:
    """Writes the model of a quantised checkpoint as numbers, in the same way. Raises ExportError
    for one that is not quantised, or in a form that is not known, and what `export_merged` raises
    of directories and disks."""
    base_dir = Path(base_dir)
    config = read_json(inside(base_dir, "config.json"))
    with SafeWeights.open(base_dir) as base:
        stored = merged_targets.of_numbers(base, config)
        shards = plan_shards(base, stored, DTYPES[dtype])
        planned = _Planned(base, shards, None, Form(dtype), _config_of(config, dtype))
        report = MergeReport(Path(out_dir), len(shards))
        report.changed_tensors = sum(1 for weight in stored.values() if weight.form != "float")
        return _write(planned, report, say or (lambda text: None))


def write_part(
    base: SafeWeights,
    names: Mapping[str, Sequence[str]],
    config: dict[str, Any],
    out_dir: Path | str,
    own: Files,
    say: Say,
) -> MergeReport:
    """Writes the tensors that `names` has under the names that it gives them, bit for bit, in the
    same way. `config`: the new config.json; `own` as in `export_merged`, and so is what is
    raised."""
    shards = plan_renamed(base, names)
    planned = _Planned(base, shards, None, BASES_OWN, config, own)
    written = sum(map(len, names.values()))
    return _write(planned, MergeReport(Path(out_dir), len(shards), 0, written), say)


@dataclass(frozen=True)
class _Planned:
    """`adapter`: None where nothing is added. `config`: what becomes of config.json, None for
    nothing."""

    base: SafeWeights
    shards: list[ShardPlan]
    adapter: Adapter | None
    form: Form
    config: dict[str, Any] | None
    own: Files = NO_FILES


def _write(
    planned: _Planned, report: MergeReport, say: Say, stop_lost: float = math.inf
) -> MergeReport:
    base, shards = planned.base, planned.shards
    fingerprint = {
        "format": FORMAT,
        "base": _base_digest(base),
        "adapter": "none" if planned.adapter is None else planned.adapter.digest,
        "form": repr(planned.form),
    }
    check_rest(base.directory)
    _check_not_merged(base.directory, fingerprint["adapter"])
    with OutDirectory.open(report.directory, fingerprint) as out:
        _write_shards(planned, out, report, say)
        for finished in out.done.values():
            for name, sums in finished["arrived"].items():
                report.arrived.setdefault(name, Arrived()).add(Arrived(**sums))
        if report.total.lost > stop_lost:
            raise ExportError(
                f"{report.directory} is not finished: {report.total}, above {stop_lost:g}"
            )
        say("writing config.json and the rest")
        weight_map = {entry.name: s.name for s in shards for entry in s.entries}
        record = _record(report, fingerprint)
        out.finish(base.directory, planned.config, weight_map, record, planned.own)
    return report


def _write_shards(planned: _Planned, out: OutDirectory, report: MergeReport, say: Say) -> None:
    shards = planned.shards
    with _workers() as pool:
        for number, shard in enumerate(shards, 1):
            where = f"shard {number} of {len(shards)}, {shard.name}"
            if shard.name in out.done:
                say(f"comparing {where}")
                if _digest_of(out.path / shard.name, shard) == out.done[shard.name]["digest"]:
                    report.kept_shards += 1
                else:
                    out.forget(shard.name)
        left = [shard for shard in shards if shard.name not in out.done]
        out.require_space(sum(shard.nbytes for shard in left))
        for shard in left:
            say(f"writing shard {shards.index(shard) + 1} of {len(shards)}, {shard.name}")
            with disk_errors(out.path / shard.name):
                writer = _ShardWriter(planned, shard, out.path, pool)
                digest, arrived = writer.run(report)
                sums = {name: asdict(one) for name, one in arrived.items()}
                out.finish_shard(shard.name, digest, sums)


class _ShardWriter:
    """Fills one file by a few threads, each step at its own place."""

    def __init__(
        self, planned: _Planned, shard: ShardPlan, directory: Path, pool: ThreadPoolExecutor
    ):
        self.shard, self.pool = shard, pool
        self.adapter, self.form = planned.adapter, planned.form
        self.files: dict[str, SafeFile] = planned.base.files
        self.path = directory / f"{shard.name}{PARTIAL}"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def run(self, report: MergeReport) -> tuple[str, dict[str, Arrived]]:
        """(checksum, what arrived); whatever is raised, the file is gone."""
        arrived: dict[str, Arrived] = {}
        digest = xxhash.xxh3_128(self.shard.header)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.fd = os.open(self.path, flags, 0o666)
            try:
                _pwrite(self.fd, memoryview(self.shard.header), 0)
                for step, (part, one) in self._in_order():
                    digest.update(part)
                    report.bytes_written += sum(length for _, length in step.writes())
                    if one is not None:
                        arrived.setdefault(step.matrix.name, Arrived()).add(one)
                os.fsync(self.fd)
            finally:
                os.close(self.fd)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        return digest.hexdigest(), arrived

    def _in_order(self) -> Iterator[tuple[Any, tuple[bytes, Arrived | None]]]:
        """Steps with their results, a few ahead of each other. None runs on after an error."""
        running: deque[tuple[Any, Future]] = deque()
        try:
            for step in self.shard.steps():
                if len(running) >= 2 * MOST_WORKERS:
                    first, future = running.popleft()
                    yield first, future.result()
                if isinstance(step, CopyStep):
                    running.append((step, self.pool.submit(self._copy, step)))
                else:
                    factors = None if self.adapter is None else self.adapter.factors(step)
                    running.append((step, self.pool.submit(self._merge, step, factors)))
            while running:
                first, future = running.popleft()
                yield first, future.result()
        finally:
            for _, future in running:
                future.cancel()
                with suppress(BaseException):
                    future.result()

    def _copy(self, step: CopyStep) -> tuple[bytes, None]:
        data = self._read(step.file, step.start, step.length)
        view = memoryview(data.numpy())
        _pwrite(self.fd, view, step.target)
        return xxhash.xxh3_64_digest(view), None

    def _merge(self, step: MergeStep, factors) -> tuple[bytes, Arrived | None]:
        source = {}
        for role, place in step.matrix.source.items():
            start, length = place.span(step.first, step.rows)
            source[role] = self._read(place.file, start, length)
        results, arrived = compute(step, source, factors, self.device, self.form)
        parts = []
        for (role, tensor), (start, length) in zip(results.items(), step.writes(), strict=True):
            view = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
            assert len(view) == length, (step.matrix.name, role)
            _pwrite(self.fd, view, start)
            parts.append(xxhash.xxh3_64_digest(view))
        return b"".join(parts), arrived

    def _read(self, file: str, start: int, length: int) -> torch.Tensor:
        data = torch.empty(length, dtype=torch.uint8)
        self.files[file].read_into(start, memoryview(data.numpy()))
        return data


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that each compute with one, rather than all with all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_WORKERS)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _pwrite(fd: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], start + done)


def _digest_of(path: Path, shard: ShardPlan) -> str | None:
    """The checksum of a finished shard as it is now; None when it is no such file."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size != shard.nbytes:
        return None
    with open(path, "rb") as file:
        digest = xxhash.xxh3_128(file.read(len(shard.header)))
        for step in shard.steps():
            for start, length in step.writes():
                digest.update(xxhash.xxh3_64_digest(os.pread(file.fileno(), length, start)))
    return digest.hexdigest()


def _base_digest(base: SafeWeights) -> str:
    """A digest of headers, sizes and times of the base's files, and of its config.json."""
    digest = xxhash.xxh3_128((base.directory / "config.json").read_bytes())
    for name, file in base.files.items():
        status = file.path.stat()
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}".encode())
        digest.update("".join(map(repr, file.entries.values())).encode())
    return digest.hexdigest()


def _config_of(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of a base that is written in another dtype: that of a model inside it too, as
    text_config, which transformers loads the language model by."""
    left_out, keys = ("quantization_config", "compression_config"), ("dtype", "torch_dtype")

    def written(part: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: written(value) if isinstance(value, Mapping) else dtype if key in keys else value
            for key, value in part.items()
            if key not in left_out
        }

    new = written(config)
    return new if any(key in new for key in keys) else new | {"dtype": dtype}


def _check_not_merged(base: Path, adapter: str) -> None:
    """Raises ExportError for a base that was merged with this very adapter."""
    file = base / RECORD
    before = read_json(file).get("merged") if file.is_file() else None
    if isinstance(before, dict) and before.get("adapter") == adapter != "none":
        raise ExportError(
            f"{base} has this adapter merged in already ({file}): it would have it twice; name the "
            "model that it was merged into with --base"
        )


def _record(report: MergeReport, fingerprint: dict[str, str]) -> dict[str, Any]:
    every = {"all": report.total, **report.arrived}
    measures = ("lost", "error_over_change", "cosine", "relative")
    rounding = {
        name: {m: v if math.isfinite(v := getattr(one, m)) else None for m in measures}
        for name, one in every.items()
    }
    return {"merged": fingerprint, "rounding": rounding}
