"""Which column of a row is the prompt and which is the answer; what a prompt must be."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from lora_moe_rl.config import SourceConfig
from lora_moe_rl.errors import DataError

PROMPT_COLUMNS = ("prompt", "messages", "question")
ANSWER_COLUMNS = ("answer", "solution", "label", "ground_truth", "reward_model.ground_truth")
# As JSON or Python print a list whose first object is a message.
SPELLED = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content)\1\s*:""")

Row = tuple[str, dict[str, Any]]  # where it stands ("data.jsonl, line 3"), and its values


def read_row(row: Row, config: SourceConfig) -> tuple[Any, dict[str, Any]]:
    """The prompt of a row, and all its other values, for the reward; the answer also under the name
    `answer`. Raises DataError for a row that has no prompt, or several that could be meant."""
    place, values = row
    if not isinstance(values, dict):
        raise DataError(f"{place}: a row must be an object, this is {short(values)}")
    key = pick_column(values, PROMPT_COLUMNS, config, "prompt_key", place)
    if key is None:
        raise DataError(
            f"{place}: no prompt; a row needs a column {', '.join(PROMPT_COLUMNS)}, or "
            f"{config.key('prompt_key')} must name one of its own: "
            f"{', '.join(values) or 'it has none'}"
        )
    text = value_in(values, key)
    if not isinstance(text, str):
        text = checked_messages(text, place, key)
    if not text:
        raise DataError(f"{place}: the prompt (column {key}) is empty")
    check_unicode(text, place, key)
    check_unanswered(text, place, key)
    return text, _columns(values, key, config, place)


def check_unanswered(prompt: str | list[dict], place: str, key: str) -> None:
    """Raises DataError for a conversation that ends with an answer, which the policy would read,
    and for one that is written as a text, which would be the prompt letter by letter."""
    if isinstance(prompt, str):
        check_unspelled(prompt, place, f"the prompt (column {key})")
    elif prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{place}: the last message of the prompt (column {key}) is the assistant's, "
            f"{short(prompt[-1]['content'])}: the policy would be given it, and begin another turn "
            "behind it; leave it out of the messages (algorithm=sft learns from it)"
        )


def check_unspelled(text: str, place: str, what: str) -> None:
    """Raises DataError for messages that are written as a text."""
    if SPELLED.match(text):
        raise DataError(
            f"{place}: {what} is a text that spells a list of messages, {short(text)}; write the "
            "list itself, in JSONL or parquet (CSV has only texts)"
        )


def _columns(values: dict, prompt_key: str, config: SourceConfig, place: str) -> dict[str, Any]:
    columns = {key: value for key, value in values.items() if key != prompt_key}
    answer_key = pick_column(columns, ANSWER_COLUMNS, config, "answer_key", place)
    if answer_key is not None:
        columns["answer"] = value_in(columns, answer_key)
    return columns


def pick_column(
    values: dict, candidates: tuple[str, ...], config: SourceConfig, key: str, place: str
) -> str | None:
    """The column that the setting `key` names, or else the only candidate that the row has.

    A dot goes into a nested object: `reward_model.ground_truth`. Raises DataError when the chosen
    column is absent, or when there are several candidates; None when there is no candidate.
    """
    chosen, named = getattr(config, key), config.key(key)
    if chosen is not None:
        if value_in(values, chosen) is None:
            raise DataError(
                f"{place}: no column {chosen!r} ({named}); it has {', '.join(values) or 'none'}"
            )
        return chosen
    found = [name for name in candidates if value_in(values, name) is not None]
    if len(found) > 1:
        raise DataError(
            f"{place}: columns {' and '.join(found)} could both be meant; name one with "
            f"{named}={found[0]}"
        )
    return found[0] if found else None


def value_in(values: dict, name: str) -> Any:
    """The value of a column, or None when it is absent or null."""
    if name in values:
        return values[name]
    value: Any = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def number_in(columns: dict[str, Any], name: str, setting: str, place: str) -> float:
    """The number in a column; a text that is one counts (CSV has only texts). `setting` is the one
    that names the column. Raises DataError for what is none."""
    value = value_in(columns, name)
    if value is None:
        raise DataError(
            f"{place}: no column {name!r} ({setting}); it has {', '.join(columns) or 'none'}"
        )
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise DataError(f"{place}: column {name} ({setting}) is not a number: {short(value)}")
    return number


def checked_messages(messages: Any, place: str, key: str) -> list[dict]:
    """Messages whose contents are texts: those in parts, as OpenAI's API writes them, are put
    together. Raises DataError for what is no list of messages, and for parts that are no text."""
    is_list = isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )
    if not is_list:
        raise DataError(
            f"{place}: the prompt (column {key}) must be a string or a list of objects with role "
            f"and content; this is {short(messages)}"
        )
    return [_with_text(message, place, key) for message in messages]


def _with_text(message: dict, place: str, key: str) -> dict:
    """A template of a text model drops a list of parts, or prints it as a list. Of parquet a key
    that another message has is null here, which templates take for one that is there."""
    content = message["content"]
    message = {k: value for k, value in message.items() if value is not None or k == "content"}
    if content is None or isinstance(content, str):
        return message
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not (is_text and isinstance(part.get("text"), str)):
            raise DataError(
                f"{place}: a message of column {key} has the content {short(part)}; it must be a "
                'text, or a list of {"type": "text", "text": ...}: nothing else is trained on'
            )
    return message | {"content": "".join(part["text"] for part in content)}


def check_unicode(text: Any, place: str, key: str) -> None:
    """JSON may name half of a surrogate pair, which is no character and has no UTF-8."""
    try:
        json.dumps(text, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: the prompt (column {key}) holds {error.object[error.start]!r}, half of a "
            "surrogate pair without the other, which is no character; mend or leave out the row"
        ) from error


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
