"""`lora-moe-rl view`, as it is called."""

import pytest
from recorded_run import record

from lora_moe_rl import cli
from lora_moe_rl.errors import FileError, RunDirError
from lora_moe_rl.page.command import main


def test_one_file_is_written(tmp_path, capsys):
    record(tmp_path / "runs" / "one")
    out = tmp_path / "out.html"
    assert cli.main(["view", str(tmp_path / "runs"), "--static", str(out), "--samples", "5"]) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")


def test_a_file_that_cannot_be_written_is_refused_before_the_page_is_made(tmp_path, monkeypatch):
    from lora_moe_rl.page import static_page

    monkeypatch.setattr(static_page, "static_page", None)
    record(tmp_path / "runs" / "one")
    with pytest.raises(FileError, match="--static .* is a directory; name a file in it"):
        main([str(tmp_path / "runs"), "--static", str(tmp_path)])
    with pytest.raises(FileError, match="--static .*: there is no directory .*nowhere"):
        main([str(tmp_path / "runs"), "--static", str(tmp_path / "nowhere/x.html")])


def test_a_directory_without_runs_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="has no run in it"):
        main([str(tmp_path)])
    with pytest.raises(RunDirError, match="is not a directory"):
        main([str(tmp_path / "nowhere")])
