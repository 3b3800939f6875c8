"""What a disk does to checkpoints: it is full, read-only, away, or has lost a block."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from checkpoints import names, write, write_checkpoint

from lora_moe_rl.errors import CheckpointError, DiskError
from lora_moe_rl.files import checkpoint
from lora_moe_rl.files.checkpoint import newest_valid


def _lies_on_a_bad_block(monkeypatch, *lost: Path, error: int = errno.EIO) -> None:
    """Reading files of these directories gives `error`, as from a disk with a bad block."""
    plain = checkpoint.sha256_of

    def reads(path):
        if any(path.is_relative_to(one) for one in lost):
            raise OSError(error, os.strerror(error), str(path))
        return plain(path)

    monkeypatch.setattr(checkpoint, "sha256_of", reads)


def test_a_file_on_a_bad_block_is_skipped(tmp_path, monkeypatch):
    earlier, newest = write(tmp_path, 1), write(tmp_path, 2)
    _lies_on_a_bad_block(monkeypatch, newest)
    found = newest_valid(tmp_path)
    assert found.path == earlier
    ((skipped, reason),) = found.skipped
    assert skipped == newest and "Input/output error" in reason


@pytest.mark.parametrize(("only_the_newest", "error"), [(False, errno.EIO), (True, errno.EACCES)])
def test_a_disk_that_gives_no_file_is_waited_for(tmp_path, monkeypatch, only_the_newest, error):
    """An older checkpoint would lose steps that are there when the disk is back."""
    paths = [write(tmp_path, 1), write(tmp_path, 2)]
    _lies_on_a_bad_block(monkeypatch, *paths[1 if only_the_newest else 0 :], error=error)
    with pytest.raises(OSError) as raised:
        newest_valid(tmp_path)
    assert raised.value.errno == error


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
