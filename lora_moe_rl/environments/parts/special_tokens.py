"""Special tokens in what tools answer: a tokenizer reads their texts as the tokens, whoever wrote
them, so that who writes a page that a tool fetches can end a turn, or begin one of another role.
Those that were added to the tokenizer alone are tokens that the model cannot be fed."""

from __future__ import annotations

import logging
import re
from typing import Any

from lora_moe_rl.models.tokenizer import foreign_ids, model_vocab_size

log = logging.getLogger(__name__)


class SpecialTokens:
    """Those of a tokenizer. The first answer that holds one is told of, once."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, size = tokenizer, model_vocab_size(tokenizer)
        self._has_others = size is not None and max(tokenizer.get_vocab().values()) >= size
        added = tokenizer.added_tokens_decoder.values()
        texts = {str(token) for token in added if token.special}
        longest_first = sorted(texts, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first))) if texts else None
        self._told = False

    def in_answer(self, tool: str, answer: str) -> bool:
        """Whether a tool's answer holds the text of one."""
        found = self._any.search(answer) if self._any is not None else None
        if found is None:
            return False
        if not self._told:
            self._told = True
            log.warning(
                "an answer of the tool %s holds %r, which the policy is fed as that special token: "
                "have the tool take such texts out if others write what it answers (told once)",
                tool, found[0],
            )  # fmt: skip
        return True

    def known(self, text: str) -> bool:
        """Whether the model has every token of a text."""
        if not self._has_others:
            return True
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return not foreign_ids(self._tokenizer, token_ids)
