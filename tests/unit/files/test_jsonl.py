"""Files of one JSON object a line: cut back to a step in place."""

from __future__ import annotations

import errno
import json
import tracemalloc
from pathlib import Path

import pytest

from lora_moe_rl.files import jsonl
from lora_moe_rl.files.jsonl import cut_after, read_jsonl


def write(path: Path, *steps: int, text: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step, "text": text}) + "\n" for step in steps))


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(path)]


def test_a_long_file_is_neither_held_in_memory_nor_written_anew(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path, *range(1, 301), text="x" * 50_000)
    before = path.stat()
    tracemalloc.start()
    cut_after(path, 298)
    assert sum(1 for _ in read_jsonl(path)) == 298
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000 < 14_000_000 < path.stat().st_size
    assert path.stat().st_ino == before.st_ino
    assert steps(tmp_path / "samples.jsonl.bak") == [299, 300]


def test_an_evaluation_on_record_after_later_steps_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 2, 3)
    cut_after(path, 2)
    assert steps(path) == [1, 2, 2] and steps(tmp_path / "metrics.jsonl.bak") == [3, 4, 3]


@pytest.mark.parametrize("last", ['{"step": 1, "te', "null\n", "\x00\x00"])
def test_a_line_that_is_none_goes_and_those_after_it_stay(tmp_path, last):
    path = tmp_path / "metrics.jsonl"
    write(path, 1)
    with open(path, "a") as file:
        file.write(last)
    cut_after(path, 5)
    assert path.read_text() == '{"step": 1, "text": ""}\n'
    assert (tmp_path / "metrics.jsonl.bak").read_text() == last.removesuffix("\n") + "\n"


def test_with_nothing_to_cut_nothing_is_made(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    cut_after(path, 2)
    cut_after(tmp_path / "none.jsonl", 2)
    assert steps(path) == [1, 2] and list(tmp_path.iterdir()) == [path]


def test_what_a_full_disk_refuses_is_cut_later_and_is_kept_once(tmp_path, monkeypatch):
    path, backup = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.bak"
    write(backup, 9)
    write(path, 1, 2, 3)
    asked, real = [], jsonl._is_until

    def full(line, step):
        asked.append(line)
        if len(asked) == 4:  # two lines of the first pass, and the last of the second
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(line, step)

    monkeypatch.setattr(jsonl, "_is_until", full)
    with pytest.raises(OSError):
        cut_after(path, 1)
    assert steps(path) == [1, 2, 3] and steps(backup) == [9]
    cut_after(path, 1)
    assert steps(path) == [1] and steps(backup) == [9, 2, 3]


def test_a_record_can_be_written_whatever_text_it_holds():
    line = jsonl.to_json({"text": "half \ud83d, whole 😀", "\udfff": float("nan")})
    assert json.loads(line.encode()) == {"text": "half ?, whole 😀", "?": None}
