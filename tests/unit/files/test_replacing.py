"""A directory that is replaced as a whole, killed at every step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_moe_rl.files import replacing as module
from lora_moe_rl.files.replacing import replace_file, replacing


class Killed(BaseException):
    """Nothing is tidied up after it."""


def write(directory: Path, text: str) -> None:
    with replacing(directory) as fresh:
        for name in ("config", "weights"):
            (fresh / name).write_text(text)


def read(directory: Path) -> str:
    """What both files say."""
    (text,) = {(directory / name).read_text() for name in ("config", "weights")}
    return text


def remove_one_file(path: Path, **_) -> None:
    if files := sorted(path.glob("*")):
        files[0].unlink()


class Killer:
    """Stops the process before step `number` of what changes the disk, or within a removal."""

    def __init__(self, monkeypatch, number: int, exchange: bool):
        self.left, self.steps = number, []
        self._wrap(monkeypatch, os, "rename")
        self._wrap(monkeypatch, os, "fsync")
        self._wrap(monkeypatch, module.shutil, "rmtree", remove_one_file)
        if not exchange:
            monkeypatch.setattr(module, "_exchange", lambda one, other: False)
        self._wrap(monkeypatch, module, "_exchange")

    def _wrap(self, monkeypatch, owner, name: str, partly=lambda *args, **_: None) -> None:
        stock = getattr(owner, name)

        def step(*args, **kwargs):
            self.steps.append(name)
            if self.left == 0:
                partly(*args, **kwargs)
                raise Killed
            self.left -= 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_at_any_step_leaves_a_whole_directory(exchange, tmp_path):
    directory, killed_at = tmp_path / "adapter", []
    for number in range(100):
        write(directory, "old")
        with pytest.MonkeyPatch.context() as patched:
            killer = Killer(patched, number, exchange)
            try:
                write(directory, "new")
            except Killed:
                killed_at.append(killer.steps[-1])
            else:
                break
        if not exchange and not directory.exists():  # between the two renames
            assert read(tmp_path / ".adapter.lora_moe_rl.old") == "old"
            with pytest.raises(RuntimeError), replacing(directory):
                raise RuntimeError("before anything is written")
        assert read(directory) in ("old", "new")
        write(directory, "newer")
        assert read(directory) == "newer"
        assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert {"fsync", "rmtree", "_exchange"} <= set(killed_at)
    assert killed_at.count("rename") == (0 if exchange else 2)
    assert read(directory) == "new"


def test_what_a_user_keeps_beside_it_stays(tmp_path):
    """Under the names that one gives to what was there before."""
    for name in ("adapter.old", "adapter.tmp", "adapter.bak"):
        write(tmp_path / name, "kept")
    for text in ("old", "new"):
        write(tmp_path / "adapter", text)
    for name in ("adapter.old", "adapter.tmp", "adapter.bak"):
        assert read(tmp_path / name) == "kept"
    assert read(tmp_path / "adapter") == "new"


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_when_the_call_returns(
    tmp_path, monkeypatch
):
    """What a machine that stops leaves is what was on the disk then."""
    path, events = tmp_path / "config.yaml", []
    path.write_text("old")

    def told(name, stock):
        def call(*args):
            if name == "sync":
                target = os.readlink(f"/proc/self/fd/{args[0]}")
                events.append((name, Path(target).name, os.fstat(args[0]).st_size))
            else:
                events.append((name, Path(args[1]).name, path.read_text()))
            return stock(*args)

        return call

    monkeypatch.setattr(os, "fsync", told("sync", os.fsync))
    monkeypatch.setattr(os, "replace", told("replace", os.replace))
    replace_file(path, b"newer")
    assert events[0] == ("sync", ".config.yaml.tmp", 5)
    assert events[1] == ("replace", "config.yaml", "old")
    assert events[2][:2] == ("sync", tmp_path.name) and len(events) == 3
    assert path.read_text() == "newer" and len(list(tmp_path.iterdir())) == 1


def test_this_file_system_can_exchange(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "one" / "file").touch()
    assert module._exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "other" / "file").exists()
    assert not module._exchange(tmp_path / "one", tmp_path / "not there")


def test_a_writer_that_fails_changes_nothing(tmp_path):
    write(tmp_path / "adapter", "old")
    with pytest.raises(ValueError), replacing(tmp_path / "adapter") as fresh:
        (fresh / "config").write_text("new")
        raise ValueError
    assert read(tmp_path / "adapter") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("there", [True, False])
def test_a_name_that_cannot_be_given_leaves_what_was_there_and_nothing_hidden(
    there, tmp_path, monkeypatch
):
    rename = os.rename

    def refused(source, target):
        if (Path(source).name, Path(target).name) == (".adapter.lora_moe_rl.tmp", "adapter"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    if there:
        write(tmp_path / "adapter", "old")
    monkeypatch.setattr(os, "rename", refused)
    monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "adapter", "new")
    assert [path.name for path in tmp_path.iterdir()] == (["adapter"] if there else [])
    assert not there or read(tmp_path / "adapter") == "old"


def test_a_link_stays_a_link_to_the_new_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "adapter")
    for text in ("old", "new"):
        write(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and read(tmp_path / "adapter") == text
