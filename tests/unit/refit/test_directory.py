"""The transport of files in a directory: what is there of a version, and whose files are taken."""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch
from transport_ranks import VERSION, all_sent, make

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.transports import (
    directory,
)


@pytest.fixture
def published(tmp_path):
    channel = make("directory", tmp_path)
    all_ = all_sent(channel)
    folder = tmp_path / "refit" / "v000012"
    return SimpleNamespace(
        channel=channel,
        root=folder.parent,
        folder=folder,
        manifest=folder / "manifest.json",
        sent=all_.sent,
        layout=all_.layouts[0],
        open=lambda: channel.incoming(0).open(all_.layouts[1], all_.sent[1]),
    )


def rewrite(published, change) -> None:
    manifest = json.loads(published.manifest.read_text())
    change(manifest)
    published.manifest.write_text(json.dumps(manifest))


def test_a_manifest_tells_all_that_was_sent(published):
    assert directory.read_manifest(published.root, VERSION) == published.sent
    names = sorted(path.name for path in published.folder.iterdir())
    assert names == ["manifest.json", "part-00000.safetensors", "part-00001.safetensors"]


def test_without_its_manifest_a_version_is_not_there(published):
    published.manifest.unlink()
    with pytest.raises(RefitError, match="version 12 is not published in .*manifest.json"):
        published.open()


def test_a_version_that_is_written_again_is_not_there_until_it_is_whole(published):
    """An earlier run came further: its version 12 must not be taken for this run's."""
    end = directory.Outgoing(str(published.root), published.layout)
    end.memory(published.layout.nbytes, torch.device("cpu"))
    end.offer(published.sent[0])
    with pytest.raises(RefitError, match="version 12 is not published"):
        published.open()


def test_a_version_that_is_offered_again_stays_whole(published):
    """A skipped update leaves the version as it was; engines that come back still need it."""
    end = directory.Outgoing(str(published.root), published.layout)
    end.memory(published.layout.nbytes, torch.device("cpu"))
    sent = end.offer(published.sent[0])
    directory.publish(published.root, [sent, published.sent[1]])
    assert end.offer(published.sent[0]) == sent
    assert directory.read_manifest(published.root, VERSION)[0] == sent
    end.offer(dataclasses.replace(published.sent[0], checksums=(1,)))
    with pytest.raises(RefitError, match="version 12 is not published"):
        directory.read_manifest(published.root, VERSION)


def test_a_file_that_is_cut_short_is_refused(published):
    path = published.folder / "part-00001.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(RefitError, match=r"part-00001.safetensors has \d+ bytes instead of"):
        published.open()
    # Even where the manifest agrees:
    rewrite(published, lambda m: m["parts"][1].update(file_bytes=path.stat().st_size))
    with pytest.raises(RefitError, match="cannot read an adapter from .*part-00001.safetensors"):
        published.open()


def test_a_missing_part_is_refused(published):
    (published.folder / "part-00001.safetensors").unlink()
    with pytest.raises(RefitError, match="there is no .*part-00001.safetensors"):
        published.open()


@pytest.mark.parametrize(
    "name", ["../v000011/part-00001.safetensors", "/etc/passwd", "..", "part-00001.bin"]
)
def test_a_manifest_cannot_name_other_files(published, name):
    rewrite(published, lambda m: m["parts"][1].update(file=name))
    with pytest.raises(RefitError, match="which is not a part"):
        published.open()


@pytest.mark.parametrize("place", ["elsewhere", "refit/v000011"])
def test_a_link_out_of_a_versions_folder_is_refused(published, tmp_path, place):
    path, other = published.folder / "part-00001.safetensors", tmp_path / place
    other.mkdir()
    path.rename(other / path.name)
    path.symlink_to(other / path.name)
    with pytest.raises(RefitError, match="leads out of .*v000012$"):
        published.open()


def test_a_manifest_that_is_nested_without_end_is_refused(published):
    published.manifest.write_text("[" * 200_000)
    with pytest.raises(RefitError, match="manifest.json cannot be read: RecursionError"):
        published.open()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["parts"][0]["checksums"].__setitem__(0, 1), "is damaged"),
        (lambda m: m.update(version=11), "is of version 11, not 12"),
        (lambda m: m.pop("parts"), "cannot be read"),
        (lambda m: m["parts"].__setitem__(0, 3), "cannot be read"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(published, change, message):
    rewrite(published, change)
    with pytest.raises(RefitError, match=message):
        published.open()


def test_a_manifest_of_another_run_is_refused(published):
    other = [dataclasses.replace(p, checksums=(1, *p.checksums[1:])) for p in published.sent]
    directory.publish(published.root, other)
    with pytest.raises(RefitError, match="does another run write there"):
        published.open()


def test_what_nfs_keeps_for_an_open_reader_ends_no_run(published):
    (published.folder / ".nfs000000000123").write_bytes(b"")
    directory.keep_only(published.root, [13])
    assert [path.name for path in published.folder.iterdir()] == [".nfs000000000123"]
    (published.folder / ".nfs000000000123").unlink()
    directory.keep_only(published.root, [13])
    assert not published.folder.exists()


def test_old_versions_are_removed_and_nothing_else(published):
    for name in ("v000010", "v000011", "v000099", "notes"):
        (published.root / name).mkdir()
        (published.root / name / "part-00000.safetensors").write_bytes(b"")
    directory.keep_only(published.root, range(11, 13))
    assert sorted(p.name for p in published.root.iterdir()) == ["notes", "v000011", "v000012"]
    published.open()


def test_a_folder_with_somebody_elses_files_stays_and_is_told_of_once(published, caplog):
    (published.folder / "notes.txt").write_text("mine")
    (published.root / "v000009").write_text("no folder")
    for newest in (13, 14):
        published.channel.keep([newest])
        assert [path.name for path in published.folder.iterdir()] == ["notes.txt"]
    assert (published.root / "v000009").read_text() == "no folder"
    (said,) = caplog.messages
    assert said == f"{published.folder} stays: it holds files that are no adapter's"


def test_a_directory_that_cannot_be_written_names_its_setting(tmp_path):
    (tmp_path / "refit").write_text("a file")
    with pytest.raises(RefitError, match="refit.directory"):
        all_sent(make("directory", tmp_path))
