"""Where a command may write, said before anything slow."""

from __future__ import annotations

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
    require_empty(inside.with_name("step-000020"))


def test_a_directory_that_holds_something_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    require_empty(tmp_path / "out")
    (tmp_path / "out/file").touch()
    with pytest.raises(FileError, match="--out .*/out is not empty"):
        require_empty(tmp_path / "out")
    with pytest.raises(FileError, match="is no directory"):
        require_empty(tmp_path / "out/file")
