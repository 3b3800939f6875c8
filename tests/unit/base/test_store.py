"""A base in a file: written once, mapped by all, refused when it is not what is wanted."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import store_users
import torch
import xxhash
from store_users import CONTENTS, KEY, fill, no_fill, values, write

from lora_moe_rl.base import owner, room
from lora_moe_rl.base.contents import Contents, Kept
from lora_moe_rl.base.store import BIN, DESCRIPTION, in_use, open_store
from lora_moe_rl.errors import HeldBaseError


def replaced(name: str, kept: Kept) -> Contents:
    return replace(CONTENTS, tensors=CONTENTS.tensors | {name: kept})


@pytest.fixture
def folder(tmp_path):
    with owner.owned(str(tmp_path)) as made:
        yield Path(made)


def in_child(work, *arguments) -> int:
    """The exit code of a process that does `work`, whatever it has started."""
    process = store_users.SERVER.Process(target=work, args=arguments)
    process.start()
    until(lambda: process.exitcode is not None)
    return process.exitcode


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_one_wrote_the_next_maps(folder):
    open_store(folder, CONTENTS, fill)
    store = open_store(folder, CONTENTS, no_fill)
    for name in CONTENTS.tensors:
        assert torch.equal(store[name], values(name).float())
        assert store[name].data_ptr() % 4096 == 0
    assert (folder / BIN).stat().st_size == 4096 + 16384 + 4096 == CONTENTS.nbytes
    described = json.loads((folder / DESCRIPTION).read_text())
    last = {"offset": 4096 + 16384, "dtype": "float32", "shape": [1]}
    assert described["tensors"]["three"] == last


def test_one_element_cannot_be_written(folder):
    for _ in range(2):  # by who has written it, and by who maps it
        assert in_child(store_users.overwrite, folder) == -signal.SIGSEGV
    assert in_child(store_users.read, folder) == 0
    store = open_store(folder, CONTENTS, no_fill)
    assert torch.equal(store["two"], values("two").float())


def test_many_at_once_write_it_once(folder, tmp_path):
    written = tmp_path / "written"
    processes = [store_users.SERVER.Process(target=write, args=(folder, written)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert written.read_text().split() == list(CONTENTS.tensors)


def test_one_that_died_over_it_leaves_nothing_that_counts(folder):
    assert in_child(store_users.die, folder) == -signal.SIGKILL
    assert (folder / BIN).exists() and not (folder / DESCRIPTION).exists()
    assert torch.equal(open_store(folder, CONTENTS, fill)["one"], values("one").float())


def test_an_error_while_it_is_written_publishes_nothing(folder):
    def fail(name, out):
        raise HeldBaseError("no such tensor")

    with pytest.raises(HeldBaseError, match="no such tensor"):
        open_store(folder, CONTENTS, fail)
    assert torch.equal(open_store(folder, CONTENTS, fill)["one"], values("one").float())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(CONTENTS, key=KEY | {"model": "b"}), "model is a there and b here"),
        (replace(CONTENTS, key=KEY | {"LoRA": "true"}), "LoRA is missing there and true here"),
        (replaced("one", Kept("bfloat16", (3, 5))), "'dtype': 'float32'.* there .*'bfloat16'"),
        (
            replaced("one", Kept("float32", (5, 3))),
            "one is .*3, 5.* there and .*5, 3.* here",
        ),
        (
            replaced("four", Kept("float32", (1,))),
            "four is None there",
        ),
    ],
)
def test_one_of_something_else_is_refused_by_name(folder, other, message):
    open_store(folder, CONTENTS, fill)
    with pytest.raises(HeldBaseError, match=message):
        open_store(folder, other, no_fill)


def damaged(folder: Path, name: str, data: bytes) -> None:
    (folder / name).chmod(0o600)
    (folder / name).write_bytes(data)


def test_a_truncated_file_is_refused(folder):
    open_store(folder, CONTENTS, fill)
    damaged(folder, BIN, (folder / BIN).read_bytes()[:-4096])
    with pytest.raises(HeldBaseError, match="has 20,480 bytes instead of 24,576: it is truncated"):
        open_store(folder, CONTENTS, no_fill)


@pytest.mark.parametrize(("place", "name"), [(0, "one"), (4096 + 15999, "two"), (20480, "three")])
def test_one_bit_that_was_changed_since_is_refused(folder, place, name):
    open_store(folder, CONTENTS, fill)
    data = bytearray((folder / BIN).read_bytes())
    data[place] ^= 16
    damaged(folder, BIN, bytes(data))
    store = open_store(folder, CONTENTS, no_fill)
    with pytest.raises(HeldBaseError, match=f"{BIN}: {name} is not what was written there"):
        store[name]
    with pytest.raises(HeldBaseError, match="is not what was written"):
        store[name]  # not once alone
    for other in CONTENTS.tensors.keys() - {name}:
        assert torch.equal(store[other], values(other).float())


def test_a_reader_of_the_file_finds_the_checksums(folder):
    open_store(folder, CONTENTS, fill, "some state")
    described = json.loads((folder / DESCRIPTION).read_text())
    data = (folder / BIN).read_bytes()
    assert described["format"] == 3 and described["source"] == "some state"
    for name, entry in described["tensors"].items():
        mine = data[entry["offset"] :][: CONTENTS.tensors[name].nbytes]
        assert described["checksums"][name] == xxhash.xxh3_128_hexdigest(mine)


@pytest.mark.parametrize("change", [{"checksums": {}}, {"checksums": None}, {"source": 3}])
def test_a_description_without_checksums_is_refused(folder, change):
    open_store(folder, CONTENTS, fill)
    described = json.loads((folder / DESCRIPTION).read_text()) | change
    damaged(folder, DESCRIPTION, json.dumps(described).encode())
    with pytest.raises(HeldBaseError, match="is damaged: it lacks checksums"):
        open_store(folder, CONTENTS, no_fill)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"{}", b"[]", b'{"key": 3}', b'{"key": {}, "tensors": 1}']
)
def test_a_damaged_description_is_refused(folder, text):
    open_store(folder, CONTENTS, fill)
    damaged(folder, DESCRIPTION, text)
    with pytest.raises(HeldBaseError, match="is damaged"):
        open_store(folder, CONTENTS, no_fill)


def test_a_missing_file_is_refused(folder):
    open_store(folder, CONTENTS, fill)
    (folder / BIN).unlink()
    with pytest.raises(HeldBaseError, match=f"{BIN}.*No such file"):
        open_store(folder, CONTENTS, no_fill)
    with pytest.raises(HeldBaseError, match="has ended, or trainer and engines are on several"):
        open_store(folder / "gone", CONTENTS, no_fill)


def test_links_and_folders_of_others_are_refused(folder, tmp_path):
    open_store(folder, CONTENTS, fill)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(HeldBaseError, match="cannot be opened"):
        open_store(link, CONTENTS, no_fill)
    (tmp_path / "elsewhere").write_bytes((folder / BIN).read_bytes())
    (folder / BIN).unlink()
    (folder / BIN).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HeldBaseError, match=f"{BIN} cannot be opened"):
        open_store(folder, CONTENTS, no_fill)
    folder.chmod(0o777)
    with pytest.raises(HeldBaseError, match="others may write into it"):
        open_store(folder, CONTENTS, no_fill)


def test_no_room_says_how_much_is_needed_and_where_else(folder, monkeypatch):
    huge = Contents(KEY, {"one": Kept("float32", (1 << 50,))})
    with pytest.raises(HeldBaseError, match=r"takes 4194304.00 GiB.*model.held_dir to a directory"):
        open_store(folder, huge, no_fill)
    # A file system that promises more than it has.
    monkeypatch.setattr("lora_moe_rl.base.store.check_room", lambda *args: None)
    with pytest.raises(HeldBaseError, match=r"takes 4194304.00 GiB.*model.held_dir to a directory"):
        open_store(folder, huge, no_fill)
    with pytest.raises(HeldBaseError, match="held_dir=/no/such: No such file"):
        room.check_room(Path("/no/such"), 1)


def test_its_folder_goes_with_its_owner_and_its_memory_with_the_last_who_has_it(tmp_path):
    with owner.owned(str(tmp_path)) as folder:
        store = open_store(folder, CONTENTS, fill)
        assert in_use(folder)
    assert not list(tmp_path.iterdir())
    assert torch.equal(store["two"], values("two").float())


def test_what_a_killed_run_left_goes_once_nobody_has_it(tmp_path):
    ready, release = store_users.SERVER.Event(), store_users.SERVER.Event()
    other = tmp_path / "another's"
    other.mkdir()
    assert in_child(store_users.own_and_die, tmp_path, ready, release) == -signal.SIGKILL
    (left,) = tmp_path.glob(f"{owner.PREFIX}*")
    assert owner.remove_left(tmp_path) == []  # its engine is still there
    release.set()
    until(lambda: not in_use(left))
    with owner.owned(str(tmp_path)) as folder, suppress(FileNotFoundError):
        assert sorted(tmp_path.iterdir()) == sorted([other, Path(folder)])
