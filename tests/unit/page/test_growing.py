"""Files that grow while they are read."""

from lora_moe_rl.files.replacing import replace_file
from lora_moe_rl.page.growing import GrowingFile, parse


def lines(file: GrowingFile) -> list[tuple[int, bytes]]:
    file.refresh()
    return list(file.read())


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    file = GrowingFile(path)
    assert lines(file) == []
    path.write_bytes(b"one\ntw")
    assert lines(file) == [(0, b"one\n")]
    with open(path, "ab") as more:
        more.write(b"o\nthree\n")
    assert lines(file) == [(4, b"two\n"), (8, b"three\n")]
    assert lines(file) == []


def test_a_file_that_another_takes_the_place_of_is_read_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntwo\n")
    file = GrowingFile(path)
    lines(file)
    before = file.generation
    replace_file(path, b"one\n2\n.\n")  # as long: its length alone does not tell
    assert file.refresh() and file.generation == before + 1
    assert [line for _, line in file.read()] == [b"one\n", b"2\n", b".\n"]
    path.unlink()
    assert lines(file) == [] and file.generation == before + 2


def test_what_is_no_json_object_is_no_record():
    assert parse(b'{"step": 1, "a": NaN, "b": -Infinity}\n') == {"step": 1, "a": None, "b": None}
    assert parse(b"[1]\n") is None
    assert parse(b'{"step": \n') is None
