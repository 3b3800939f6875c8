"""Copies in the background: whole or not there, bounded in tries and time, and fetched again."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fsspec.config
import numpy as np
import pytest
from checkpoints import write_checkpoint
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from safetensors.numpy import save_file

from lora_moe_rl import cli
from lora_moe_rl.config import CheckpointConfig
from lora_moe_rl.errors import CheckpointError, ConfigError, FileError
from lora_moe_rl.files import checkpoint, pusher, storage
from lora_moe_rl.files.checkpoint import MANIFEST, newest_valid
from lora_moe_rl.files.fetch import fetch
from lora_moe_rl.files.owner import OWNER, OthersError
from lora_moe_rl.files.pusher import Pusher

pytestmark = pytest.mark.seconds


@pytest.fixture
def run(tmp_path) -> Path:
    """A run directory with a config and an adapter."""
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    (run / "config.yaml").write_text("name: pushed\n")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (run / "adapter" / name).write_text(name)
    return run


def write(run: Path, step: int) -> Path:
    with write_checkpoint(run / "checkpoints", step, 2, {"step": step}) as directory:
        save_file({"w": np.full(1000, step, np.float32)}, directory / "trainer_00000.safetensors")
    return run / "checkpoints" / f"step-{step:06d}"


def pushing(run: Path, target, said: list[str] | None = None, goes_on=None, **settings) -> Pusher:
    config = CheckpointConfig(push_to=str(target), **settings)

    def say(text: str) -> None:
        if said is not None and not text.startswith("waiting until"):  # on a busy machine
            said.append(text)

    made = Pusher(config, run, say)
    made.begin((run / "config.yaml").read_text(), goes_on)
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_was_pushed_is_what_was_written(run, tmp_path):
    said: list[str] = []
    with pushing(run, tmp_path / "copies", said) as push:
        push.push(write(run, 3), run / "adapter")
    copies = tmp_path / "copies"
    assert files(copies / "checkpoints") == files(run / "checkpoints")
    assert files(copies / "adapters/step-000003") == files(run / "adapter")
    assert push.pushed == 3 and not said and not (run / "pushing").exists()


def test_a_checkpoint_that_is_pruned_before_its_turn_is_pushed_all_the_same(run, tmp_path):
    with pushing(run, tmp_path / "copies") as push:
        path = write(run, 1)
        push.push(path, None)
        expected = files(path)
        shutil.rmtree(path)
    assert files(tmp_path / "copies/checkpoints/step-000001") == expected


def test_a_newer_one_takes_the_place_of_one_that_waits(run, tmp_path, monkeypatch):
    said: list[str] = []
    copy = Pusher._copy
    monkeypatch.setattr(Pusher, "_copy", lambda self, taken: (time.sleep(1), copy(self, taken)))
    with pushing(run, tmp_path / "copies", said) as push:
        for step in (1, 2, 3):
            push.push(write(run, step), None)
            time.sleep(0.2)
    assert storage.steps(str(tmp_path / "copies")) == [1, 3]
    assert "step-000002 is not copied" in said[0]


def test_a_process_that_cannot_be_started_is_a_try_that_failed(run, tmp_path, monkeypatch):
    """Memory is short for a moment."""
    said: list[str] = []
    real, fails = subprocess.Popen, [OSError(errno.ENOMEM, "Cannot allocate memory")]

    def popen(*args, **options):
        if fails:
            raise fails.pop()
        return real(*args, **options)

    with pushing(run, tmp_path / "copies", said, push_retries=1) as push:
        monkeypatch.setattr(pusher.subprocess, "Popen", popen)
        push.push(write(run, 1), None)
    assert push.pushed == 1 and not fails and not said


def test_whatever_a_copy_fails_with_the_next_has_its_turn(run, tmp_path, monkeypatch):
    said: list[str] = []
    copy = Pusher._copy

    def fails_first(self, taken):
        if taken.name == "step-000001":
            raise KeyError("what")
        copy(self, taken)

    monkeypatch.setattr(Pusher, "_copy", fails_first)
    with pushing(run, tmp_path / "copies", said) as push:
        push.push(write(run, 1), None)
        while not said:
            time.sleep(0.05)
        push.push(write(run, 2), None)
    assert push.pushed == 2 and "step-000001 was not copied" in said[0] and "KeyError" in said[0]


def test_copies_of_another_run_are_not_written_over(run, tmp_path):
    with pushing(run, tmp_path / "copies") as push:
        push.push(write(run, 1), None)
    before = files(tmp_path / "copies")
    with pytest.raises(ConfigError, match="holds copies of a run already"):
        pushing(run, tmp_path / "copies")
    assert files(tmp_path / "copies") == before
    with pushing(run, tmp_path / "copies", goes_on=1):
        pass


def other(tmp_path) -> Path:
    """Another run's directory."""
    directory = tmp_path / "other"
    directory.mkdir()
    (directory / "config.yaml").write_text("name: of another\n")
    return directory


def test_a_place_has_one_owner_whoever_goes_on(run, tmp_path):
    copies, said = tmp_path / "copies", list[str]()
    with pushing(run, copies) as push:
        push.push(write(run, 1), None)
    before = files(copies)
    with pytest.raises(ConfigError, match=f"another run's, that in {run} .*name another place"):
        pushing(other(tmp_path), copies, goes_on=1)
    shutil.copytree(run, tmp_path / "same")
    with pytest.raises(ConfigError, match="another run's"):  # `cp -r` makes another run
        pushing(tmp_path / "same", copies, said, goes_on=1)
    assert files(copies) == before
    run.rename(tmp_path / "moved")
    with pushing(tmp_path / "moved", copies, said, goes_on=1):
        pass
    assert not said


def test_of_two_runs_that_begin_with_one_place_the_second_is_refused(run, tmp_path):
    with pushing(run, tmp_path / "copies"), pytest.raises(ConfigError, match="another run's"):
        pushing(other(tmp_path), tmp_path / "copies")
    own = run / "config.yaml"
    assert (tmp_path / "copies/config.yaml").read_bytes() == own.read_bytes()


def test_a_run_that_was_fetched_takes_the_place_over_also_while_the_first_goes_on(run, tmp_path):
    copies, said, again = tmp_path / "copies", list[str](), tmp_path / "again"
    with pushing(run, copies, said) as push:
        push.push(write(run, 1), None)
        while push.pushed != 1:
            time.sleep(0.05)
        fetch(str(copies), again)
        with pushing(again, copies, goes_on=1) as its:
            its.push(write(again, 2), None)
        there = files(copies)
        push.push(write(run, 3), None)
    assert files(copies) == there and storage.steps(str(copies)) == [1, 2]
    assert len(said) == 1 and "step-000003 was not copied" in said[0]
    assert f"another run's, that in {again} " in said[0]
    with pushing(again, copies, goes_on=2):
        pass


@pytest.mark.parametrize(
    ("target", "why"),
    [("{tmp}/run/config.yaml/x", "Not a directory|NotADirectory"), ("nosuch://x/y", "nosuch")],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(
    run, tmp_path, target, why
):
    target = target.format(tmp=tmp_path)
    with pytest.raises(ConfigError, match=f"checkpoint.push_to=.*({why})"):
        pushing(run, target, push_retries=0)
    said: list[str] = []
    with pushing(run, target, said, goes_on=1, push_retries=0):
        pass  # a run that goes on at night does not end for it
    assert "the run goes on" in said[0]


def test_tries_are_bounded_and_the_last_failure_is_said(run, tmp_path, monkeypatch):
    said: list[str] = []
    tries = []
    monkeypatch.setattr(pusher, "FIRST_PAUSE_S", 0.01)
    with pushing(run, tmp_path / "copies", said, push_retries=2) as push:
        real = Pusher._try

        def refused(self, words, deadline):
            tries.append(words)
            (tmp_path / "copies/checkpoints").write_text(f"in the way {len(tries)}")
            real(self, words, deadline)

        monkeypatch.setattr(Pusher, "_try", refused)
        began = time.monotonic()
        push.push(write(run, 1), None)
        took = time.monotonic() - began
    assert len(tries) == 3 and len(said) == 1
    assert "step-000001 was not copied" in said[0] and "Error" in said[0]
    assert newest_valid(run / "checkpoints").path is not None
    assert took < 60  # it did not wait for the tries, each of which starts a process


def test_what_hangs_is_ended_by_its_time(run, tmp_path, monkeypatch):
    said: list[str] = []
    (run / "hang.py").write_text("import time; time.sleep(1000)")
    with pushing(run, tmp_path / "copies", said, push_retries=9) as push:
        hanging = CheckpointConfig(push_to=str(tmp_path), push_timeout_s=1, push_retries=9)
        push.config = hanging
        popen = subprocess.Popen
        monkeypatch.setattr(
            pusher.subprocess,
            "Popen",
            lambda command, **more: popen([sys.executable, str(run / "hang.py")], **more),
        )
        push.push(write(run, 1), None)
    assert "no end within push_timeout_s=1" in said[0]


def test_the_process_of_a_copy_ends_when_nobody_holds_its_input(tmp_path):
    """As when the run was killed outright, and nothing of it could end what it had started."""
    hang = "storage.begin = lambda *_: (print('begun', flush=True), time.sleep(900))"
    code = f"import time; from lora_moe_rl.files import storage; {hang}"
    words = ["begin", ".", str(tmp_path), "config.yaml"]
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}; storage.main({words!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == b"begun\n" and child.poll() is None
        child.stdin.close()
        assert child.wait(120) == 1
    finally:
        child.kill()


def test_a_run_is_fetched_and_the_newest_whole_checkpoint_with_it(run, tmp_path):
    copies = tmp_path / "copies"
    with pushing(run, copies) as push:
        push.push(write(run, 1), None)
    with pushing(run, copies, goes_on=1) as push:
        push.push(write(run, 2), run / "adapter")
    shutil.copytree(copies / "checkpoints/step-000002", copies / "checkpoints/step-000003")
    (copies / "checkpoints/step-000003" / MANIFEST).unlink()  # a copy that was cut off
    out = tmp_path / "out"
    assert fetch(str(copies), out) == out / "checkpoints/step-000002"
    assert newest_valid(out / "checkpoints").metadata == {"step": 2}
    assert (out / "config.yaml").read_text() == "name: pushed\n"
    made = json.loads((out / OWNER).read_text())
    assert made["follows"] == json.loads((run / OWNER).read_text())["run"] != made["run"]
    assert fetch(str(copies), tmp_path / "first", 1).name == "step-000001"
    with pytest.raises(FileError, match="has no checkpoint of step 7; it has .1, 2."):
        fetch(str(copies), tmp_path / "none", 7)


def test_without_its_config_nothing_is_fetched(run, tmp_path):
    copies = tmp_path / "copies"
    with pushing(run, copies) as push:
        push.push(write(run, 1), None)
    (copies / "config.yaml").unlink()
    with pytest.raises(FileError, match="has no config.yaml"):
        fetch(str(copies), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_copies_of_a_course_that_the_run_has_left_are_not_fetched_and_not_lost(run, tmp_path):
    copies, said = tmp_path / "copies", list[str]()
    with pushing(run, copies) as push:
        push.push(write(run, 8), None)
        while push.pushed != 8:
            time.sleep(0.05)
        push.push(write(run, 10), run / "adapter")
    there = files(copies)
    (run / "config.yaml").write_text("name: of another rate\n")
    with pushing(run, copies, said, goes_on=8):
        assert storage.steps(str(copies)) == [8]  # before anything new is there
    assert len(said) == 1 and "goes on from step 8" in said[0] and "(10)" in said[0]
    assert fetch(str(copies), tmp_path / "out").name == "step-000008"
    last = {
        f"checkpoints/step-000010/{MANIFEST}": "checkpoints/step-000010/left.json",
        "adapters/step-000010/adapter_config.json": "adapters/step-000010/left.json",
    }
    expected = {last.get(name, name): data for name, data in there.items()}
    assert files(copies) == expected | {"config.yaml": b"name: of another rate\n"}
    with pushing(run, copies, said, goes_on=8) as push:
        push.push(write(run, 10), None)  # the new course comes to that step
    assert storage.steps(str(copies)) == [8, 10] and len(said) == 1
    assert not (copies / "checkpoints/step-000010/left.json").exists()


def test_a_place_that_was_away_at_the_start_is_told_before_the_first_copy(run, tmp_path):
    copies, said = tmp_path / "copies", list[str]()
    with pushing(run, copies) as push:
        push.push(write(run, 5), None)
    copies.rename(tmp_path / "away")
    copies.write_text("no directory")
    with pushing(run, copies, said, goes_on=3, push_retries=0) as push:
        assert "the run goes on" in said[0]
        copies.unlink()
        (tmp_path / "away").rename(copies)
        push.push(write(run, 4), None)
    assert storage.steps(str(copies)) == [4]
    assert "goes on from step 3" in said[1] and "(5)" in said[1]


def test_a_damaged_copy_is_passed_over_and_nothing_is_written_elsewhere(run, tmp_path):
    copies = tmp_path / "copies"
    with pushing(run, copies) as push:
        push.push(write(run, 1), None)
    shutil.copytree(copies / "checkpoints/step-000001", copies / "checkpoints/step-000002")
    manifest = copies / "checkpoints/step-000002" / MANIFEST
    hostile = json.loads(manifest.read_text())
    hostile["files"]["../../../out of it"] = {"size": 1, "sha256": ""}
    hostile.pop("sha256")
    hostile["sha256"] = checkpoint.digest_of(hostile)
    manifest.write_text(json.dumps(hostile))
    assert fetch(str(copies), tmp_path / "out").name == "step-000001"
    tensors = copies / "checkpoints/step-000001/trainer_00000.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(
        CheckpointError, match="no checkpoint of .* is valid:\n.*not a path.*\n.*SHA"
    ):
        fetch(str(copies), tmp_path / "other")


def test_a_copy_that_is_cut_off_anywhere_is_none(run, tmp_path, monkeypatch):
    source, copies = write(run, 4), tmp_path / "copies"
    target = f"{copies}/checkpoints/step-000004"
    put = LocalFileSystem.put_file

    def put_some(self, path, place, **more):
        if path.endswith(cut):
            raise OSError("the network is gone")
        put(self, path, place, **more)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_some)
    for cut in ("trainer_00000.safetensors", MANIFEST):  # noqa: B007
        with pytest.raises(OSError, match="network"):
            storage.upload(source, target)
        assert storage.steps(str(copies)) == []
    cut = "nothing"
    storage.upload(source, target)
    assert storage.steps(str(copies)) == [4]
    cut = "trainer_00000.safetensors"
    (source / MANIFEST).write_text("another run's, of the same step")
    with pytest.raises(OSError, match="network"):
        storage.upload(source, target)
    assert storage.steps(str(copies)) == []  # no half of each


@pytest.fixture
def s3(monkeypatch):
    """A bucket of moto's S3 server on this machine, asked over HTTP."""
    pytest.importorskip("s3fs", reason="pip install s3fs")
    server = pytest.importorskip("moto.server", reason="pip install moto[server]")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-nobody")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.config.set_conf_env(fsspec.config.conf)
    url_to_fs("s3://bucket")[0].mkdir("bucket")
    yield "s3://bucket/run"
    fsspec.config.conf.pop("s3", None)
    running.stop()


@pytest.fixture
def memory():
    """As far from a directory as S3 is: paths without folders."""
    return "memory://bucket/run"


@pytest.mark.parametrize("place", ["memory", "s3"])
def test_storage_of_fsspec_is_a_place_too(place, request, run, tmp_path):
    place = request.getfixturevalue(place)
    write(run, 4)
    own = run / "config.yaml"
    storage.begin(run, place, own, goes_on=None)
    source = run / "checkpoints/step-000004"
    for _ in range(2):  # what is there already is not copied again
        storage.upload(source, f"{place}/checkpoints/step-000004")
    with pytest.raises(ConfigError, match="holds copies"):
        storage.begin(run, place, own, goes_on=None)
    with pytest.raises(OthersError, match=f"another run's, that in {run} "):
        storage.begin(other(tmp_path), place, own, goes_on=4)
    assert storage.steps(place) == [4]
    assert storage.begin(run, place, own, goes_on=4) == []
    assert files(fetch(place, tmp_path / "out")) == files(source)
    assert storage.begin(run, place, own, goes_on=3) == [4]
    assert storage.steps(place) == []
    storage.begin(tmp_path / "out", place, own, goes_on=4)
    with pytest.raises(OthersError, match=f"another run's, that in {tmp_path / 'out'} "):
        storage.begin(run, place, own, goes_on=4)


class Refusing(LocalFileSystem):
    """What a protocol's package raises, of a class of its own."""

    protocol = "refusing"

    def ls(self, *parts, **more):
        raise LookupError("Unable to locate credentials\n  in five places")


def test_what_a_protocol_raises_is_told_in_a_line(tmp_path, capsys):
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    assert cli.main(["fetch", "refusing://bucket/mine", "--out", str(tmp_path / "out")]) == 2
    assert "that can be listed: Unable to locate credentials\n" in capsys.readouterr().err
