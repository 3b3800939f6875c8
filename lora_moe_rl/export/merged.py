"""An adapter merged into its base, as a stream: a complete Hugging Face checkpoint.

    plan (headers alone) -> each shard: pread rows, W + scale * B A, pwrite -> all other files

Each shard of the base is read once and each of the result written once, a few rows at a time, by a
few threads. An interrupted merge goes on: finished shards are compared with their checksums and
kept. What no adapter changes is copied bit for bit.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.export import merged_targets
from lora_moe_rl.export.merged_adapter import Adapter
from lora_moe_rl.export.merged_out import PARTIAL, OutDirectory, disk_errors
from lora_moe_rl.export.merged_plan import CopyStep, MergeStep, ShardPlan, plan_shards
from lora_moe_rl.export.merged_weights import QuantisationError, compute
from lora_moe_rl.files.untrusted import SafeFile, SafeWeights, inside, read_json

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MOST_WORKERS = 4
FORMAT = "1"  # of the result; an unfinished merge of another one is not gone on with
Say = Callable[[str], None]


@dataclass
class MergeReport:
    """`errors`: of quantised tensors alone. `bytes_*` are of shards that were written, not of
    those found finished."""

    directory: Path
    shards: int = 0
    kept_shards: int = 0
    changed_tensors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    errors: dict[str, QuantisationError] = field(default_factory=dict)


def export_merged(
    spec: AdapterSpec,
    tensors: Mapping[str, np.ndarray],
    base_dir: Path | str,
    out_dir: Path | str,
    dtype: str | None = None,
    say: Say | None = None,
) -> MergeReport:
    """Writes `out_dir`. `tensors`: canonical, read one layer at a time and not kept, so that a lazy
    mapping keeps memory small. `dtype`: float32, bfloat16 or float16 for the result in place of the
    base's own form.

    Raises AdapterError for tensors that are not the spec's, ExportError for a base that does not
    fit them, an output directory that is in the way and a disk that refuses, FileError for a
    damaged base.
    """
    base_dir, out_dir, say = Path(base_dir), Path(out_dir), say or (lambda text: None)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is none of {', '.join(DTYPES)}")
    config = read_json(inside(base_dir, "config.json"))
    with SafeWeights.open(base_dir) as base:
        wanted = DTYPES[dtype] if dtype else None
        stored = merged_targets.find(base, config, spec, wanted)
        shards = plan_shards(base, stored, wanted)
        say("reading the adapter")
        adapter = Adapter(spec, tensors)
        fingerprint = {
            "format": FORMAT,
            "base": _base_digest(base),
            "adapter": adapter.digest,
            "dtype": str(dtype),
        }
        report = MergeReport(out_dir, shards=len(shards))
        report.changed_tensors = sum(1 for weight in stored.values() if weight.parts)
        with OutDirectory.open(out_dir, fingerprint) as out:
            _merge_shards(base, shards, adapter, out, report, say)
            say("writing config.json and the rest")
            weight_map = {entry.name: s.name for s in shards for entry in s.entries}
            new_config = None if dtype is None else _config_of(config, dtype)
            out.finish(base_dir, new_config, weight_map, _record(out, fingerprint))
            for finished in out.done.values():
                for name, sums in finished["errors"].items():
                    report.errors.setdefault(name, QuantisationError()).add(
                        QuantisationError(*sums)
                    )
    return report


def _merge_shards(
    base: SafeWeights,
    shards: list[ShardPlan],
    adapter: Adapter,
    out: OutDirectory,
    report: MergeReport,
    say: Say,
) -> None:
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
            say(f"merging shard {shards.index(shard) + 1} of {len(shards)}, {shard.name}")
            with disk_errors(out.path / shard.name):
                digest, errors = _ShardWriter(base, shard, adapter, out.path, pool).run(report)
                sums = {name: [e.error, e.value, e.delta] for name, e in errors.items()}
                out.finish_shard(shard.name, digest, sums)


class _ShardWriter:
    """Fills one file by a few threads, each step at its own place."""

    def __init__(
        self,
        base: SafeWeights,
        shard: ShardPlan,
        adapter: Adapter,
        directory: Path,
        pool: ThreadPoolExecutor,
    ):
        self.shard, self.adapter, self.pool = shard, adapter, pool
        self.files: dict[str, SafeFile] = base.files
        self.path = directory / f"{shard.name}{PARTIAL}"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def run(self, report: MergeReport) -> tuple[str, dict[str, QuantisationError]]:
        """(checksum, errors); whatever is raised, the file is gone."""
        errors: dict[str, QuantisationError] = {}
        digest = xxhash.xxh3_128(self.shard.header)
        try:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            try:
                _pwrite(self.fd, memoryview(self.shard.header), 0)
                for step, (part, nbytes, error) in self._in_order():
                    digest.update(part)
                    report.bytes_read += nbytes
                    report.bytes_written += sum(length for _, length in step.writes())
                    if error is not None:
                        name = step.matrix.name
                        errors.setdefault(name, QuantisationError()).add(error)
                os.fsync(self.fd)
            finally:
                os.close(self.fd)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        return digest.hexdigest(), errors

    def _in_order(self) -> Iterator[tuple[Any, tuple[bytes, int, QuantisationError | None]]]:
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
                    factors = self.adapter.factors(step)
                    running.append((step, self.pool.submit(self._merge, step, factors)))
            while running:
                first, future = running.popleft()
                yield first, future.result()
        finally:
            for _, future in running:
                future.cancel()
                with suppress(BaseException):
                    future.result()

    def _copy(self, step: CopyStep) -> tuple[bytes, int, None]:
        data = self._read(step.file, step.start, step.length)
        view = memoryview(data.numpy())
        _pwrite(self.fd, view, step.target)
        return xxhash.xxh3_64_digest(view), step.length, None

    def _merge(self, step: MergeStep, factors) -> tuple[bytes, int, QuantisationError | None]:
        source, nbytes = {}, 0
        for role, place in step.matrix.source.items():
            start, length = place.span(step.first, step.rows)
            source[role] = self._read(place.file, start, length)
            nbytes += length
        results, error = compute(step, source, factors, self.device)
        parts = []
        for (role, tensor), (start, length) in zip(results.items(), step.writes(), strict=True):
            view = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
            assert len(view) == length, (step.matrix.name, role)
            _pwrite(self.fd, view, start)
            parts.append(xxhash.xxh3_64_digest(view))
        return b"".join(parts), nbytes, error

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
    """config.json of a base that is written in another dtype."""
    left_out = ("quantization_config", "compression_config")
    new = {key: value for key, value in config.items() if key not in left_out}
    keys = [key for key in ("dtype", "torch_dtype") if key in new] or ["dtype"]
    return new | dict.fromkeys(keys, dtype)


def _record(out: OutDirectory, fingerprint: dict[str, str]) -> dict[str, Any]:
    errors = {
        name: {"relative": e.relative, "over_delta": e.over_delta}
        for finished in out.done.values()
        for name, sums in finished["errors"].items()
        for e in [QuantisationError(*sums)]
    }
    return {"merged": fingerprint, "quantisation_errors": errors}
