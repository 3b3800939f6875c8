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
from lora_moe_rl.page.growing import LinesByKey

# How a line begins: the rest of it, which may be a megabyte, is read for the sample that is shown.
HEAD = re.compile(rb'\{"step": (\d+), "sample": (\d+),')
CUT = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for a part of a character
LONGEST = 8  # tokens of one character


class TokenLines:
    def __init__(self, path: Path):
        self._lines = LinesByKey(path, _sample_of)
        self._lock = threading.Lock()

    def of(self, step: Any, sample: Any) -> dict[str, Any] | None:
        """The line of a sample, by its number in the step; None where the run has kept none."""
        with self._lock:
            self._lines.refresh()
            return self._lines.read((step, sample))


def _sample_of(line: bytes) -> tuple[int, int] | None:
    return (int(head[1]), int(head[2])) if (head := HEAD.match(line)) else None


@lru_cache(maxsize=4)
def tokenizer_of(model: str | None) -> Tokenizer | None:
    """The tokenizer of `model.path`, if it is on this machine: nothing is fetched or made."""
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
