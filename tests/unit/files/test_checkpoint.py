"""The write protocol: whatever happens to a checkpoint, no half-written one is ever valid."""

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from checkpoints import FILES, names, write, write_checkpoint

from lora_moe_rl.errors import CheckpointError
from lora_moe_rl.files import checkpoint, checkpoint_writing
from lora_moe_rl.files.checkpoint import MANIFEST, newest_valid, read_manifest
from lora_moe_rl.files.saving import FileSum

SUM = FileSum(100, hashlib.sha256(bytes(100)).hexdigest())


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
