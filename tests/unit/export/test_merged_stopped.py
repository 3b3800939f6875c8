"""A merge that is stopped, or has no room."""

from __future__ import annotations

import contextlib
import resource
import shutil

import pytest
from merge_bases import (
    looks_whole,
    random_adapter,
)

from lora_moe_rl.errors import ExportError
from lora_moe_rl.export import merged
from lora_moe_rl.export.merged import export_merged
from lora_moe_rl.export.merged_weights import Form


def interrupt(monkeypatch, after: int) -> None:
    original, count = merged._pwrite, iter(range(10**9))

    def write(*args):
        if next(count) == after:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(merged, "_pwrite", write)


def test_an_interrupted_merge_goes_on(sharded, monkeypatch):
    base, spec, tensors, out = sharded
    with monkeypatch.context() as patch:
        interrupt(patch, after=150)
        with pytest.raises(KeyboardInterrupt):
            export_merged(spec, tensors, base, out)
    finished = sorted(path.name for path in out.glob("*.safetensors"))
    assert finished and not looks_whole(out) and not list(out.glob("*.partial"))
    times = {name: (out / name).stat().st_mtime_ns for name in finished}
    damaged = finished[0]  # bits that flipped meanwhile
    data = bytearray((out / damaged).read_bytes())
    data[-1] ^= 1
    (out / damaged).write_bytes(data)
    (out / "model-99.safetensors.partial").write_text("left over")

    report = export_merged(spec, tensors, base, out)

    assert report.kept_shards == len(finished) - 1
    for name in finished[1:]:
        assert (out / name).stat().st_mtime_ns == times[name]
    export_merged(spec, tensors, base, other := out.with_name("other"))
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in other.iterdir())
    for path in other.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_an_unfinished_merge_of_something_else_is_in_the_way(sharded, monkeypatch):
    base, spec, tensors, out = sharded
    with monkeypatch.context() as patch:
        interrupt(patch, after=150)
        with pytest.raises(KeyboardInterrupt):
            export_merged(spec, tensors, base, out)
    with pytest.raises(ExportError, match="unfinished result of another adapter"):
        export_merged(spec, random_adapter(spec, seed=1), base, out)
    with pytest.raises(ExportError, match="unfinished result of another form"):
        export_merged(spec, tensors, base, out, Form(dtype="float16"))
    (base / "config.json").touch()
    (base / "model-0.safetensors").touch()
    with pytest.raises(ExportError, match="unfinished result of another base"):
        export_merged(spec, tensors, base, out)


def test_a_full_directory_is_not_written_to(sharded):
    base, spec, tensors, out = sharded
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="out is not empty .it holds notes.txt"):
        export_merged(spec, tensors, base, out)
    with pytest.raises(ExportError, match="base is not empty"):
        export_merged(spec, tensors, base, base)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_disk_without_room_is_told_before_anything_is_written(sharded, monkeypatch):
    base, spec, tensors, out = sharded
    usage = shutil.disk_usage(base)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ExportError, match="GB more, and its disk has 0.0 GB free"):
        export_merged(spec, tensors, base, out)
    assert not list(out.glob("*.safetensors"))


@contextlib.contextmanager
def largest_file(nbytes: int):
    """A disk that refuses at this size of a file, as a full one does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_in_the_middle_leaves_nothing_that_looks_whole(sharded):
    base, spec, tensors, out = sharded
    sizes = sorted(path.stat().st_size for path in base.glob("*.safetensors"))
    with (
        largest_file(sizes[-1] - 1000),
        pytest.raises(ExportError, match="File too large. It is not a whole checkpoint"),
    ):
        export_merged(spec, tensors, base, out)
    assert not looks_whole(out) and not list(out.glob("*.partial"))
    report = export_merged(spec, tensors, base, out)
    assert report.shards == len(sizes) and looks_whole(out)


def test_a_disk_that_refuses_the_last_files_leaves_nothing_that_looks_whole(sharded):
    base, spec, tensors, out = sharded
    large = max(path.stat().st_size for path in base.glob("*.safetensors")) + 1000
    with open(base / "tokenizer.json", "wb") as file:
        file.truncate(large + 1)
    with largest_file(large), pytest.raises(ExportError, match="tokenizer|File too large"):
        export_merged(spec, tensors, base, out)
    assert not looks_whole(out) and not list(out.glob("*.partial"))
    assert export_merged(spec, tensors, base, out).kept_shards > 1
