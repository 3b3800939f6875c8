"""What is held of a directory that others may remove."""

from __future__ import annotations

import os
import shutil

import pytest

from lora_moe_rl.files.linking import held


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "run" / "step-000005"
    (folder / "part").mkdir(parents=True)
    (folder / "manifest.json").write_text("all")
    (folder / "part" / "weights").write_text("values")
    return folder


def test_what_is_removed_meanwhile_is_there_until_the_end(checkpoint, tmp_path):
    own = tmp_path / "run-eval"
    with held(checkpoint, own / ".evaluated") as kept:
        shutil.rmtree(checkpoint)
        assert kept.name == "step-000005" and (kept / "manifest.json").read_text() == "all"
        assert (kept / "part" / "weights").read_text() == "values"
    assert not own.exists()


def test_what_the_block_writes_beside_it_stays(checkpoint, tmp_path):
    own = tmp_path / "run-eval"
    with held(checkpoint, own / ".evaluated"):
        (own / "metrics.jsonl").touch()
    assert [path.name for path in own.iterdir()] == ["metrics.jsonl"]
    assert (checkpoint / "part" / "weights").read_text() == "values"


def test_without_hard_links_it_is_the_directory_itself(checkpoint, tmp_path, monkeypatch):
    def refused(source, target):
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", refused)
    with held(checkpoint, tmp_path / "run-eval" / ".evaluated") as kept:
        assert kept == checkpoint
    assert not (tmp_path / "run-eval").exists() and checkpoint.exists()
