"""A disk that refuses while a run goes on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import DiskWait, RunDirError
from lora_moe_rl.files import trouble
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.files.trouble import Lines, Trouble, waited_for


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said() -> list[str]:
    return []


def full(path: Path) -> None:
    """The kernel's own full disk."""
    path.symlink_to("/dev/full")


def test_lines_that_a_full_disk_refuses_are_written_in_order_once_there_is_room(tmp_path, said):
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path, Trouble(said.append))
    full(path)
    for number in range(3):
        lines.append(f"{number}\n")
    assert len(said) == 1 and "No space left on device; 1 lines wait" in said[0]
    path.unlink()
    lines.append("3\n")
    assert path.read_text() == "0\n1\n2\n3\n"
    assert said[1] == f"{path} can be written again"


def test_lines_that_a_disk_takes_may_be_longer_than_what_may_wait(tmp_path, said, monkeypatch):
    monkeypatch.setattr(trouble, "MOST_KEPT", 8)
    lines = Lines(tmp_path / "lines", Trouble(said.append))
    for text in ("1\n", "long and longer\n", "3\n"):
        lines.append(text)
    assert (tmp_path / "lines").read_text() == "1\nlong and longer\n3\n" and not said


def test_it_is_said_each_minute_and_not_more_often(said):
    clock = Time()
    found = Trouble(said.append, clock)
    for seconds in (0, 30, 29, 2, 58, 3):
        clock.now += seconds
        found.failed("a checkpoint", "the disk is full")
    assert len(said) == 3  # at 0, 61 and 122
    assert not found.due("a checkpoint")
    clock.now += 60
    assert found.due("a checkpoint")


def test_a_line_that_came_half_is_completed(tmp_path, said, monkeypatch):
    path, write = tmp_path / "lines", os.write
    lines = Lines(path, Trouble(said.append))
    room = [3]

    def little_room(descriptor, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, room[0] = room[0], 0
        return write(descriptor, data[:taken])

    monkeypatch.setattr(os, "write", little_room)
    lines.append("0123456\n")
    assert path.read_text() == "012" and said
    room[0] = 100
    lines.append("89\n")
    assert path.read_text() == "0123456\n89\n"


def test_what_waits_in_memory_is_bounded_and_what_is_lost_is_said(tmp_path, said, monkeypatch):
    monkeypatch.setattr(trouble, "MOST_KEPT", 10)
    monkeypatch.setattr(trouble, "SAY_EVERY_S", 0.0)
    path = tmp_path / "lines"
    full(path)
    lines = Lines(path, Trouble(said.append))
    for number in range(20):
        lines.append(f"{number:03d}\n")
    assert "2 lines wait in memory, and 18 are lost" in said[-1]


def config_in(folder: Path) -> RunConfig:
    return RunConfig(logging={"run_dir": str(folder)})


def test_a_runs_metrics_outlive_a_full_disk(tmp_path, said):
    with RunDir(config_in(tmp_path), False, said.append) as run_dir:
        full(run_dir.metrics_file)
        run_dir.append(run_dir.metrics_file, [{"step": 1}])
        run_dir.metrics_file.unlink()
        # Nothing more is written: what waits is, when the run ends.
    assert list(read_jsonl(run_dir.metrics_file)) == [{"step": 1}]


def test_lines_that_still_wait_when_the_run_ends_are_said_to_be_lost(tmp_path, said):
    """Also within the minute in which nothing more is said of the file."""
    with RunDir(config_in(tmp_path), False, said.append) as run_dir:
        full(run_dir.metrics_file)
        for step in range(50):
            run_dir.append(run_dir.metrics_file, [{"step": step}])
    assert len(said) == 2 and f"50 lines of {run_dir.metrics_file} are lost" in said[1]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_directory_that_is_away_for_a_moment_is_waited_for(tmp_path, said, monkeypatch, number):
    """A ticket that has run out, a server that starts anew: it was not deleted."""
    stat, opened, away = Path.stat, os.open, [False]

    def refused(real):
        def call(*args, **options):
            if away[0]:
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        return call

    monkeypatch.setattr(Path, "stat", refused(stat))
    monkeypatch.setattr(os, "open", refused(opened))
    with RunDir(config_in(tmp_path), False, said.append) as run_dir:
        away[0] = True
        run_dir.append(run_dir.metrics_file, [{"step": 1}])
        assert not run_dir.gone() and "1 lines wait in memory" in said[0]
        away[0] = False
        run_dir.append(run_dir.metrics_file, [{"step": 2}])
    assert [record["step"] for record in read_jsonl(run_dir.metrics_file)] == [1, 2]


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("anew", [False, True])
def test_a_run_whose_directory_was_deleted_ends_and_writes_nothing_there(tmp_path, anew):
    folder = tmp_path / "run"
    with RunDir(config_in(folder), False) as run_dir:
        remove(folder)
        if anew:  # another run has begun in its place
            folder.mkdir()
            (folder / ".lock").write_text("")
        with pytest.raises(RunDirError, match="deleted, moved or replaced"):
            run_dir.append(run_dir.metrics_file, [{"step": 1}])
    assert not run_dir.metrics_file.exists()


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("lora_moe_rl.files.run_dir.replace_file", read_only)
    with pytest.raises(RunDirError, match="Read-only file system; choose another.*run_dir=DIR"):
        RunDir(config_in(tmp_path), False).__enter__()


def test_no_deadline_is_of_a_clock_that_can_be_set():
    """Where the wall clock is read, and what for."""
    for_show = {"telemetry/timeline.py", "files/retention.py", "service/start.py"}
    for_show |= {"endpoint/replies.py", "telemetry/trackers/mlflow.py"}  # what protocols want
    root = Path(__file__).parents[3]
    found = set()
    for folder in ("adapters", "kernels", "refit", "router_replay", "lora_moe_rl"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            if any(f"{word}(" in text for word in ("time.time", "datetime.now", "utcnow", "today")):
                found.add(path.relative_to(root / "lora_moe_rl", walk_up=True).as_posix())
    assert found == for_show


def test_json_of_records_is_as_it_was(tmp_path):
    with RunDir(config_in(tmp_path), False) as run_dir:
        run_dir.append(run_dir.order_file, [{"step": 1, "text": "é\u2028", "x": float("nan")}])
    assert json.loads(run_dir.order_file.read_text()) == {"step": 1, "text": "é\u2028", "x": None}


@pytest.mark.parametrize("error", [ConnectionError("a server is away"), TimeoutError("late")])
def test_a_server_that_is_away_is_not_the_disk(tmp_path, error):
    with pytest.raises(type(error)), waited_for(tmp_path, resume=True):
        raise error
    with pytest.raises(DiskWait), waited_for(tmp_path, resume=True):
        raise TimeoutError(errno.ETIMEDOUT, "the disk's server")
