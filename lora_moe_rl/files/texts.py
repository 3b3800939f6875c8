"""Texts from others, which files, tokenizers and servers are to take."""

from __future__ import annotations


def encodable(text: str) -> str:
    """The text with a ? for each lone half of a surrogate pair, which Python and JSON know, and
    UTF-8 does not."""
    return text.encode("utf-8", "replace").decode()
