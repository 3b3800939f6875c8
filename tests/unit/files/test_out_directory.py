"""Where a command may write, said before anything slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_moe_rl.errors import FileError
from lora_moe_rl.files.out_directory import require_empty, require_file, require_place


def test_nothing_is_written_into_a_checkpoint(tmp_path):
    """It would be none any more, and go with the next that is written."""
    inside = tmp_path / "run/checkpoints/step-000010"
    inside.mkdir(parents=True)
    (inside / "manifest.json").write_text("{}")
    for refused in (
        lambda: require_empty(inside / "peft"),
        lambda: require_empty(inside / "a/b"),
        lambda: require_file(inside / "curve.png", "--png"),
        lambda: require_place(inside, "the run directory"),
    ):
        with pytest.raises(FileError, match=f"{inside}, a checkpoint; name a place outside"):
            refused()
    require_empty(inside.parent / "peft")


def test_what_is_no_disk_takes_no_directory():
    with pytest.raises(FileError, match="the run directory: /proc cannot be written to"):
        require_place(Path("/proc/x"), "the run directory")


def test_a_directory_that_holds_something_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    require_empty(tmp_path / "out")
    (tmp_path / "out/file").touch()
    with pytest.raises(FileError, match="--out .*/out is not empty"):
        require_empty(tmp_path / "out")
    with pytest.raises(FileError, match="is no directory"):
        require_empty(tmp_path / "out/file")


def test_nothing_is_written_that_a_run_would_take_for_its_checkpoint(tmp_path, monkeypatch):
    """Commands that read the run warn of it from then on: it has no manifest."""
    checkpoints = tmp_path / "run/checkpoints"
    (checkpoints / "step-000007").mkdir(parents=True)
    monkeypatch.chdir(checkpoints)
    for out in (checkpoints / "step-000009", checkpoints / "step-1000000/a", Path("step-000007")):
        with pytest.raises(FileError, match=f"a checkpoint of the run {tmp_path}/run; name a pl"):
            require_empty(out)
    for name in ("step-9", "step-000009-peft", "peft"):
        require_empty(checkpoints / name)
    require_empty(tmp_path / "step-000009")
    (checkpoints / "step-000007/model.safetensors").touch()  # another tool's
    require_empty(checkpoints / "step-000007/peft")
