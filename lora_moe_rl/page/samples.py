"""samples.jsonl, of any length: where each record stands, what it can be chosen and sorted by, and
its texts to search in.

Numbers of all samples are kept in memory (some 60 bytes each). The texts, in lower case, stand in
an unnamed temporary file that is mapped: a search is one pass over it, and a run of many gigabytes
does not fill the memory.
"""

from __future__ import annotations

import json
import math
import mmap
import tempfile
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from lora_moe_rl.files.earlier_records import with_drawn
from lora_moe_rl.page.growing import GrowingFile, parse

Order = Literal["newest", "oldest", "reward", "-reward", "advantage", "-advantage", "-tokens"]
ORDERS: tuple[Order, ...] = (
    "newest", "oldest", "reward", "-reward", "advantage", "-advantage", "-tokens",
)  # fmt: skip
PREVIEW = 240  # characters of a text in a list
END = b"\0"  # between the texts of two samples


@dataclass(frozen=True)
class Choice:
    """Which samples: bounds are inclusive, and None where there is none. `text` stands somewhere in
    prompt, response, messages or failure, in upper or lower case."""

    step_from: int | None = None
    step_to: int | None = None
    drawn: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    finish: str = ""
    data_set: str = ""
    text: str = ""
    order: Order = "newest"


class Samples:
    """The index of one run's samples."""

    def __init__(self, path: Path):
        self.path = path
        self._file = GrowingFile(path)
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._offsets, self._lengths = array("q"), array("q")
        self._step, self._drawn, self._tokens = array("q"), array("q"), array("q")
        self._reward, self._advantage = array("d"), array("d")
        self._finish, self._set = array("q"), array("q")
        self._words: dict[str, int] = {"": 0}  # finish reasons and names of data sets
        self._texts: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this lives)
        self._text_begins = array("q")
        self._text_end = 0
        # The text that was searched for last, how far, and where it was found: another filter
        # beside it does not search again.
        self._searched: tuple[bytes, int, array[int]] = (b"", 0, array("q"))

    def choose(self, choice: Choice, offset: int, limit: int) -> dict[str, Any]:
        """JSON: how many samples there are and are chosen, and `limit` of these from `offset`."""
        with self._lock:
            self._refresh()
            chosen = self._sorted(self._chosen(choice), choice.order)
            page = chosen[offset : offset + limit].tolist()
            return {
                "samples": len(self._offsets),
                "chosen": len(chosen),
                "finish_reasons": self._used(self._finish),
                "data_sets": self._used(self._set),
                "list": [self._brief(number) for number in page],
            }

    def record(self, number: int) -> dict[str, Any] | None:
        """The whole record of a sample, by its place in the file; None when there is none."""
        with self._lock:
            self._refresh()
            if not 0 <= number < len(self._offsets):
                return None
            return self._read(number)

    def _chosen(self, choice: Choice) -> np.ndarray:
        """int64: the numbers of the samples, ascending."""
        fits = np.ones(len(self._offsets), dtype=bool)
        step, reward = _view(self._step), _view(self._reward)
        if choice.step_from is not None:
            fits &= step >= choice.step_from
        if choice.step_to is not None:
            fits &= step <= choice.step_to
        if choice.drawn is not None:
            fits &= _view(self._drawn) == choice.drawn
        if choice.reward_from is not None:
            fits &= reward >= choice.reward_from
        if choice.reward_to is not None:
            fits &= reward <= choice.reward_to
        if choice.finish:
            fits &= _view(self._finish) == self._words.get(choice.finish, -1)
        if choice.data_set:
            fits &= _view(self._set) == self._words.get(choice.data_set, -1)
        if choice.text:
            found = np.zeros(len(fits), dtype=bool)
            found[self._with_text(_folded(choice.text))] = True
            fits &= found
        return np.flatnonzero(fits)

    def _sorted(self, chosen: np.ndarray, order: Order) -> np.ndarray:
        """Equals stand as they do in the file; a sample without the number comes last."""
        if order == "oldest":
            return chosen
        if order == "newest":
            return chosen[np.argsort(-_view(self._step)[chosen], kind="stable")]
        name = order.removeprefix("-")
        keys = np.array(_view(getattr(self, f"_{name}"))[chosen], dtype=float)
        return chosen[np.argsort(-keys if order.startswith("-") else keys, kind="stable")]

    def _with_text(self, needle: bytes) -> np.ndarray:
        """int64: the numbers of the samples whose texts have it, ascending."""
        before, begin, found = self._searched
        if needle != before:
            begin, found = 0, array("q")
        if begin < self._text_end:
            found = found + self._search(needle, begin)
        self._searched = (needle, self._text_end, found)
        return _view(found)

    def _search(self, needle: bytes, begin: int) -> array[int]:
        """In what was written from `begin` on, which is where a sample's texts begin."""
        self._texts.flush()
        begins, found = self._text_begins, array("q")
        ends = [*begins[1:], self._text_end]
        with mmap.mmap(self._texts.fileno(), self._text_end, access=mmap.ACCESS_READ) as texts:
            number, at = bisect_right(begins, begin) - 1, texts.find(needle, begin)
            while at >= 0:
                if at >= ends[number]:  # a word that most samples have is in the next one
                    number = bisect_right(begins, at, number) - 1
                found.append(number)
                number += 1
                if number == len(ends):
                    break
                at = texts.find(needle, ends[number - 1])
        return found

    def _refresh(self) -> None:
        if self._file.refresh():
            self._texts.close()
            self._clear()
        self._texts.seek(self._text_end)
        for offset, line in self._file.read():
            record = parse(line)
            if record is not None:
                self._add(offset, len(line), with_drawn(record))

    def _add(self, offset: int, length: int, record: dict[str, Any]) -> None:
        self._offsets.append(offset)
        self._lengths.append(length)
        whole = (self._step, "step"), (self._drawn, "drawn"), (self._tokens, "tokens")
        for column, name in whole:
            value = record.get(name)
            column.append(value if isinstance(value, int) else -1)
        for column, name in ((self._reward, "reward"), (self._advantage, "advantage")):
            value = record.get(name)
            column.append(float(value) if isinstance(value, int | float) else math.nan)
        for column, name in ((self._finish, "finish_reason"), (self._set, "data_set")):
            word = str(record.get(name) or "")
            column.append(self._words.setdefault(word, len(self._words)))
        text = _folded("\n".join(_texts_of(record))) + END
        self._text_begins.append(self._text_end)
        self._text_end += self._texts.write(text)

    def _read(self, number: int) -> dict[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(self._offsets[number])
            record = parse(file.read(self._lengths[number])) or {}
        return {"number": number} | with_drawn(record)

    def _brief(self, number: int) -> dict[str, Any]:
        return brief(self._read(number))

    def _used(self, column: array) -> list[str]:
        used = set(np.unique(_view(column)).tolist())
        return sorted(word for word, code in self._words.items() if word and code in used)


def brief(record: dict[str, Any]) -> dict[str, Any]:
    """What a list shows of a sample: its numbers, and how its texts begin."""
    kept = ("number", "sample", "step", "drawn", "data_set", "reward", "advantage", "tokens")
    found = {key: record.get(key) for key in (*kept, "finish_reason", "failure")}
    found["prompt"] = prompt_text(record.get("prompt"))[-PREVIEW:]
    found["response"] = str(record.get("response") or "")[:PREVIEW]
    found["turns"] = len(record.get("messages") or ())
    return found


def prompt_text(prompt: Any) -> str:
    """What a prompt says: itself, or what its last message does."""
    if isinstance(prompt, list):
        prompt = prompt[-1] if prompt else ""
    if isinstance(prompt, dict):
        prompt = prompt.get("content")
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _texts_of(record: dict[str, Any]) -> Iterator[str]:
    prompt = record.get("prompt")
    yield from (_message_texts(prompt) if isinstance(prompt, list) else [str(prompt)])
    yield str(record.get("response") or "")
    yield from _message_texts(record.get("messages") or [])
    yield str(record.get("failure") or "")


def _message_texts(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else message
        yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _folded(text: str) -> bytes:
    return text.lower().replace("\0", " ").encode("utf-8", "replace")


def _view(column: array) -> np.ndarray:
    """A copy: while a view of it lives, an array cannot grow."""
    return np.array(column)
