"""tokens.jsonl, of any length: the tokens of one sample, and what each of them reads as."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.models.directory import find_local
from lora_moe_rl.models.tokenizer import WHOLE
from lora_moe_rl.page.growing import GrowingFile, parse

# How a line begins: the rest of it, which may be a megabyte, is read for the sample that is shown.
HEAD = re.compile(rb'\{"step": (\d+), "sample": (\d+),')
CUT = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for a part of a character
LONGEST = 8  # tokens of one character


class TokenLines:
    """Where the line of each sample stands, by step and number in the step."""

    def __init__(self, path: Path):
        self.path = path
        self._file = GrowingFile(path)
        self._lock = threading.Lock()
        self._lines: dict[tuple[Any, Any], tuple[int, int]] = {}

    def of(self, step: Any, sample: Any) -> dict[str, Any] | None:
        """The line of a sample; None where the run has kept none."""
        with self._lock:
            if self._file.refresh():
                self._lines.clear()
            for offset, line in self._file.read():
                if head := HEAD.match(line):
                    self._lines[int(head[1]), int(head[2])] = (offset, len(line))
            if (place := self._lines.get((step, sample))) is None:
                return None
            with open(self.path, "rb") as file:
                file.seek(place[0])
                return parse(file.read(place[1]))


@lru_cache(maxsize=4)
def tokenizer_of(model: str | None) -> Tokenizer | None:
    """That of `model.path`, if it is on this machine: nothing is fetched or made."""
    try:
        folder = find_local(model) if model else None
    except LoraMoeRlError:
        return None
    if folder is None or not (folder / WHOLE).is_file():
        return None
    return Tokenizer.from_file(str(folder / WHOLE))


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """What each token reads as; ids in angle brackets without a tokenizer. A character that several
    tokens make up stands at the last of them, and the others read as nothing."""
    if tokenizer is None:
        return [f"⟨{one}⟩" for one in ids]
    found, begin = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False)
        if text.endswith(CUT) and end < len(ids) and end - begin < LONGEST:
            found.append("")
        else:
            found.append(text)
            begin = end
    return found
