"""The write protocol: whatever happens to a checkpoint, no half-written one is ever valid."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from safetensors.numpy import save_file

from lora_moe_rl.errors import CheckpointError, DiskError
from lora_moe_rl.files import checkpoint, checkpoint_writing
from lora_moe_rl.files.checkpoint import MANIFEST, newest_valid, read_manifest
from lora_moe_rl.files.saving import FileSum

SUM = FileSum(100, hashlib.sha256(bytes(100)).hexdigest())
FILES = ("trainer_00000.safetensors", "data/position.json")


def write(root: Path, step: int, keep: int = 2) -> Path:
    metadata = {"step": step, "data": {"row": step * 16}}
    with write_checkpoint(root, step, keep, metadata) as directory:
        save_file({"w": np.full(50, step, np.float32)}, directory / FILES[0])
        (directory / "data").mkdir()
        (directory / FILES[1]).write_text(json.dumps({"row": step}))
        metadata["late"] = [step]
    return root / f"step-{step:06d}"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_written_is_found(tmp_path):
    path = write(tmp_path, 12)
    found = newest_valid(tmp_path)
    assert found.path == path
    assert found.metadata == {"step": 12, "data": {"row": 192}, "late": [12]}
    assert found.skipped == []
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == sorted(
        [*FILES, MANIFEST]
    )


def test_none_yet(tmp_path):
    assert newest_valid(tmp_path / "checkpoints") == checkpoint.Found(None, {}, [])


def test_metadata_with_number_keys_is_verified_as_it_is_read(tmp_path):
    with write_checkpoint(tmp_path, 1, 2, {"by_rank": {2: "a", 10: "b"}, "t": (1, 2)}):
        pass
    assert newest_valid(tmp_path).metadata == {"by_rank": {"2": "a", "10": "b"}, "t": [1, 2]}


def test_the_newest_are_kept(tmp_path):
    for step in (5, 10, 15, 20):
        write(tmp_path, step)
    assert names(tmp_path) == ["step-000015", "step-000020"]


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_skipped(tmp_path, name, share):
    earlier, newest = write(tmp_path, 1), write(tmp_path, 2)
    os.truncate(newest / name, int((newest / name).stat().st_size * share))
    found = newest_valid(tmp_path)
    assert found.path == earlier
    ((skipped, reason),) = found.skipped
    assert skipped == newest and name in reason


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_missing_file_is_skipped(tmp_path, name):
    earlier, newest = write(tmp_path, 1), write(tmp_path, 2)
    (newest / name).unlink()
    found = newest_valid(tmp_path)
    assert found.path == earlier
    assert found.skipped == [(newest, f"{name} is missing")]


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_found(tmp_path, name):
    path = write(tmp_path, 1)
    whole = (path / name).read_bytes()
    for at in range(0, len(whole), 7):
        (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=f"{name} is corrupt"):
            read_manifest(path)
    (path / name).write_bytes(whole)
    read_manifest(path)


def test_a_flipped_byte_of_the_manifest_never_changes_what_is_read(tmp_path):
    path = write(tmp_path, 1)
    whole, metadata = (path / MANIFEST).read_bytes(), read_manifest(path)
    refused = 0
    for at in range(len(whole)):
        (path / MANIFEST).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            assert read_manifest(path) == metadata  # whitespace
        except CheckpointError:
            refused += 1
    assert refused > len(whole) // 2


def test_a_renamed_checkpoint_is_refused(tmp_path):
    write(tmp_path, 1).rename(tmp_path / "step-000009")
    with pytest.raises(CheckpointError, match="the manifest is of step 1"):
        newest_valid(tmp_path)


def test_a_file_that_was_added_is_refused(tmp_path):
    path = write(tmp_path, 1)
    shutil.copy(path / FILES[0], path / "trainer_00001.safetensors")
    with pytest.raises(CheckpointError, match="trainer_00001.safetensors is not in the manifest"):
        read_manifest(path)


def test_files_of_nobodys_are_left_aside(tmp_path, caplog):
    """Of a system, an editor, a server of NFS, a person."""
    path = write(tmp_path, 1)
    for name in (".DS_Store", f".{FILES[0]}.swp", ".nfs0000000001", "data/.nfs01", "notes.txt"):
        (path / name).write_text("")
    (path / ".#notes.txt").symlink_to("somebody@somewhere.1")
    found = newest_valid(tmp_path)
    assert found.path == path and not found.skipped
    assert "notes.txt is not in the manifest" in caplog.text and ".nfs" not in caplog.text
    (path / FILES[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{FILES[1]} is missing"):
        read_manifest(path)


def test_they_are_not_taken_in_while_a_checkpoint_is_written(tmp_path):
    with write_checkpoint(tmp_path, 1, 2, {}) as directory:
        (directory / ".DS_Store").write_text("")
        (directory / "data").write_text("")
    (tmp_path / "step-000001/.DS_Store").unlink()
    assert newest_valid(tmp_path).path is not None


def test_checkpoints_that_cannot_be_looked_for_are_not_none(tmp_path, monkeypatch):
    """Else a run would begin anew, and set aside all that it has."""

    def refuses(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    write(tmp_path, 1)
    monkeypatch.setattr(os, "listdir", refuses)
    monkeypatch.setattr(os, "scandir", refuses)
    with pytest.raises(PermissionError):
        newest_valid(tmp_path)


def test_what_the_disk_refuses_is_told_from_who_is_late(tmp_path):
    with pytest.raises(DiskError), checkpoint.disk_errors(tmp_path):
        raise OSError(errno.ETIMEDOUT, "Connection timed out")  # of NFS
    for other in (TimeoutError("an actor"), ConnectionResetError(errno.ECONNRESET, "reset")):
        with pytest.raises(type(other)), checkpoint.disk_errors(tmp_path):
            raise other


def test_a_link_is_refused(tmp_path):
    path = write(tmp_path, 1)
    (path / FILES[0]).rename(tmp_path / "elsewhere")
    (path / FILES[0]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        read_manifest(path)


def rewrite_manifest(path: Path, change) -> None:
    """As a writer would who knows the digest."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    change(manifest)
    manifest["sha256"] = checkpoint.digest_of(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.pop("files"), "has no files as"),
        (lambda m: m.pop("step"), "has no step as"),
        (lambda m: m.pop("metadata"), "has no metadata as"),
        (lambda m: m.update(files=[]), "has no files as"),
        (lambda m: m["files"].update({FILES[0]: {"size": 1}}), f"SHA-256 of {FILES[0]}"),
    ],
)
def test_a_manifest_that_lacks_something_is_refused(tmp_path, change, reason):
    path = write(tmp_path, 1)
    rewrite_manifest(path, change)
    with pytest.raises(CheckpointError, match=reason):
        read_manifest(path)


def test_a_manifest_that_is_nested_without_end_is_refused(tmp_path):
    path = write(tmp_path, 1)
    (path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        read_manifest(path)


@pytest.mark.parametrize("part", [0, 99])
def test_a_file_that_its_writer_named_and_that_is_not_seen_whole_makes_no_checkpoint(
    tmp_path, monkeypatch, part
):
    monkeypatch.setattr(checkpoint_writing, "LATE_FILE_S", 0.3)
    earlier = write(tmp_path, 1)
    names_told: dict[str, FileSum] = {}
    with (
        pytest.raises(CheckpointError, match=r"trainer_00001.safetensors was written by its rank"),
        write_checkpoint(tmp_path, 2, 2, {}, names_told) as directory,
    ):
        names_told |= dict.fromkeys(("trainer_00000.safetensors", "trainer_00001.safetensors"), SUM)
        (directory / "trainer_00000.safetensors").write_bytes(bytes(100))
        (directory / "trainer_00001.safetensors").write_bytes(bytes(part))
    assert names(tmp_path) == [earlier.name]


def test_a_file_that_is_seen_late_is_waited_for(tmp_path):
    def show() -> None:
        (directory / "late").write_bytes(bytes(100))

    with write_checkpoint(tmp_path, 1, 2, {}, {"late": SUM}) as directory:
        threading.Timer(0.5, show).start()
    assert (newest_valid(tmp_path).path / "late").stat().st_size == 100


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "data/../../secret", "..\\secret"])
def test_a_manifest_cannot_name_files_outside(tmp_path, name):
    path = write(tmp_path, 1)
    rewrite_manifest(path, lambda m: m["files"].update({name: {"size": 1, "sha256": "0" * 64}}))
    with pytest.raises(CheckpointError, match="not a path inside the checkpoint"):
        read_manifest(path)


def test_when_none_is_valid_all_are_named(tmp_path):
    for step in (1, 2):
        (write(tmp_path, step) / FILES[0]).unlink()
    with pytest.raises(CheckpointError) as caught:
        newest_valid(tmp_path)
    assert "step-000001" in str(caught.value) and "step-000002" in str(caught.value)


def test_an_invalid_one_is_replaced_when_its_step_comes_again(tmp_path):
    write(tmp_path, 1)
    (write(tmp_path, 2) / FILES[0]).unlink()
    write(tmp_path, 2)
    found = newest_valid(tmp_path)
    assert found.path == tmp_path / "step-000002" and not found.skipped
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_one_that_is_written_again_is_there_at_every_moment(tmp_path, monkeypatch):
    """Also where the disk becomes full, or the process ends, before the new one is whole."""
    path = write(tmp_path, 2)

    def looked(function):
        def look(*args, **kwargs):
            read_manifest(path)
            done = function(*args, **kwargs)
            read_manifest(path)
            return done

        return look

    for owner, name in ((os, "rename"), (os, "fsync"), (checkpoint_writing.shutil, "rmtree")):
        monkeypatch.setattr(owner, name, looked(getattr(owner, name)))
    with write_checkpoint(tmp_path, 2, 2, {"again": True}):
        pass
    assert read_manifest(path) == {"again": True} and names(tmp_path) == [path.name]


def test_who_wrote_a_file_says_its_sum_and_it_is_not_read_again(tmp_path, monkeypatch):
    read = []
    stock = checkpoint_writing.sha256_of
    monkeypatch.setattr(checkpoint_writing, "sha256_of", lambda p: read.append(p.name) or stock(p))
    written: dict[str, FileSum] = {}
    with write_checkpoint(tmp_path, 1, 2, {}, written) as directory:
        (directory / "small").write_text("x")
        (directory / "large").write_bytes(bytes(100))
        written["large"] = SUM
    assert read == ["small"] and newest_valid(tmp_path).metadata == {}
    with write_checkpoint(tmp_path, 2, 2, {}, {"large": SUM}) as directory:
        (directory / "large").write_bytes(bytes(99) + b"1")
    assert newest_valid(tmp_path).path == tmp_path / "step-000001"  # its writer said otherwise


def test_files_are_summed_up_at_once_and_the_first_by_name_is_blamed(tmp_path, monkeypatch):
    """Each sum waits until another one is under way; two files have a wrong byte."""
    path = write(tmp_path, 5)
    both, stock = threading.Barrier(2), checkpoint.sha256_of

    def met(file: Path) -> str:
        both.wait(30)
        return stock(file)

    monkeypatch.setattr(checkpoint, "sha256_of", met)
    assert read_manifest(path)["step"] == 5
    for name in FILES:
        content = bytearray((path / name).read_bytes())
        content[-1] ^= 1
        (path / name).write_bytes(content)
    first = min(FILES)
    with pytest.raises(CheckpointError, match=f"^{first} is corrupt: its SHA-256 differs$"):
        read_manifest(path)


def test_later_invalid_ones_do_not_crowd_out_valid_ones(tmp_path):
    write(tmp_path, 10, keep=2)
    (write(tmp_path, 20, keep=2) / FILES[0]).unlink()
    write(tmp_path, 15, keep=2)  # resumed from 10
    assert names(tmp_path) == ["step-000010", "step-000015"]


def test_an_error_in_the_body_leaves_nothing(tmp_path):
    earlier = write(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt), write_checkpoint(tmp_path, 2, 2, {}) as directory:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt
    assert names(tmp_path) == [earlier.name]


@pytest.mark.parametrize("function", ["fsync", "mkdir", "rename"])
def test_a_full_disk_leaves_the_earlier_one(tmp_path, monkeypatch, function):
    earlier = write(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, full)
    with pytest.raises(CheckpointError, match=r"No space left on device.* stay valid"):
        write(tmp_path, 2)
    monkeypatch.undo()
    assert names(tmp_path) == [earlier.name]
    assert newest_valid(tmp_path).path == earlier


def test_a_timeout_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(TimeoutError), write_checkpoint(tmp_path, 1, 2, {}):
        raise TimeoutError("an actor did not answer")


CHILD = """
import os, resource, signal, sys
import numpy as np
from pathlib import Path
from lora_moe_rl.files import checkpoint_writing
from lora_moe_rl.files.saving import save_safetensors
from lora_moe_rl.errors import CheckpointError
root = Path(sys.argv[1])
"""


def run_child(root: Path, code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", CHILD + textwrap.dedent(code), str(root)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "writing",
    [
        'save_safetensors(directory / "w.safetensors", {"w": np.zeros(200_000, np.float32)})',
        '(directory / "w.bin").write_bytes(bytes(800_000))',
    ],
)
def test_a_disk_that_really_refuses(tmp_path, writing):
    """Past the file size limit the kernel refuses a write in the middle of a file, as when full."""
    earlier = write(tmp_path, 1)
    child = run_child(
        tmp_path,
        f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with checkpoint_writing.write_checkpoint(root, 2, {{}}) as directory:
                {writing}
        except CheckpointError as error:
            print(error)
            sys.exit(7)
        """,
    )
    assert child.returncode == 7, child.stderr
    assert "File too large" in child.stdout and "stay valid" in child.stdout
    assert names(tmp_path) == [earlier.name]
    assert newest_valid(tmp_path).path == earlier


@pytest.mark.parametrize("point", ["sync", "digest_of", "_move_into_place"])
def test_a_writer_that_dies_leaves_no_checkpoint(tmp_path, point):
    earlier = write(tmp_path, 1)
    child = run_child(
        tmp_path,
        f"""
        checkpoint_writing.{point} = lambda *args: os._exit(9)
        with checkpoint_writing.write_checkpoint(root, 2, {{}}) as directory:
            (directory / "w.bin").write_bytes(bytes(1000))
        """,
    )
    assert child.returncode == 9
    assert any(name.startswith("tmp-") for name in names(tmp_path))
    assert newest_valid(tmp_path).path == earlier
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]
