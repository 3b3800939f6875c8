"""From the text of an answer to what an engine should have sampled: its tokens, and the one that
ends it."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from lora_moe_rl.data.columns import short
from lora_moe_rl.errors import DataError

ANCHORS = ("\n", "=", "a")  # texts behind which an answer is encoded
REASONING = re.compile(r"</?think(?:ing)?>")


class AnswerTokens:
    """`ends`: ids of the tokens that end a response, as the model's files name them."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]):
        self._tokenizer, self._ends = tokenizer, ends

    def of(self, rest: str, rendered: bool, place: str) -> list[int]:
        """The tokens of `rest`, what follows a prompt, without what a template puts behind the end
        of a turn (`rendered`), with an end where there is none. Raises DataError for an answer of
        no tokens."""
        token_ids, ends = self._behind(rest, place), self._ends
        last = max((i for i, one in enumerate(token_ids) if one in ends), default=-1)
        if last >= 0 and not self._tokenizer.decode(token_ids[last + 1 :]).strip():
            found = token_ids[: last + 1]
        else:
            if rendered:
                token_ids = self._behind(rest.rstrip(), place)
            found = [*token_ids, self._end(place)]
        if len(found) < 2:
            raise DataError(
                f"{place}: the model's tokenizer makes no tokens of the answer, {short(rest)}; "
                "leave the row out, or write another answer"
            )
        return found

    def _behind(self, rest: str, place: str) -> list[int]:
        """As tokens that follow others: SentencePiece gives a text by itself a space in front,
        which would be learned as a part of the answer."""
        alone, (before, length) = self._encoded(rest), self._first_anchor
        shown = self._tokenizer.decode(before + alone)[length:]
        if rest.startswith(" ") or not shown.startswith(" "):
            return alone
        for anchor in ANCHORS:
            before, both = self._encoded(anchor), self._encoded(anchor + rest)
            if both[: len(before)] == before:
                return both[len(before) :]
        raise DataError(
            f"{place}: the model's tokenizer puts a space before the answer, {short(rest)}, and "
            "makes no tokens of it without one; begin the answer with a space of its own"
        )

    @cached_property
    def _first_anchor(self) -> tuple[list[int], int]:
        """Its tokens, and how many characters they are."""
        token_ids = self._encoded(ANCHORS[0])
        return token_ids, len(self._tokenizer.decode(token_ids))

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _end(self, place: str) -> int:
        """The token that an engine stops at; the tokenizer's own, if it is one of several."""
        own, ends = self._tokenizer.eos_token_id, self._ends
        if not ends:
            raise DataError(
                f"{place}: the model names no token that ends a response (eos_token_id in its "
                "generation_config.json or config.json), and an answer needs one; name it there"
            )
        return own if own in ends else min(ends)


def check_whole(answer: str, rest: str, place: str) -> None:
    """Raises DataError when a chat template leaves something out of the answer that it renders as
    `rest`: many cut off what stands before </think>. They may set other white space."""
    shown = " ".join(rest.split())
    for part in [answer] if _said(answer, shown) else REASONING.split(answer):
        if not _said(part, shown):
            raise DataError(
                f"{place}: the model's chat template leaves out of the answer {short(part)}, which "
                "would not be learned; give a template that shows it (model.chat_template_file), "
                "or the prompt and the answer as strings, as the model should see and write them"
            )


def _said(text: str, shown: str) -> bool:
    return " ".join(text.split()) in shown
