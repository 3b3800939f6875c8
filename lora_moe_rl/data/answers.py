"""Which columns of a row are the answers to learn from, by TRL's conventions.

    answers   prompt, completion         a string, or a list of one message of the assistant
              messages                   the last one, the assistant's; the others are the prompt
    pairs     prompt, chosen, rejected   as above, the answer that is better and the one that is not
              chosen, rejected           conversations that differ in their last message alone

`data.prompt_key` and `data.answer_key` name other columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lora_moe_rl.config import LearnsFrom, SourceConfig
from lora_moe_rl.data.columns import (
    PROMPT_COLUMNS,
    Row,
    check_unanswered,
    check_unicode,
    check_unspelled,
    checked_messages,
    pick_column,
    short,
    value_in,
)
from lora_moe_rl.errors import DataError

COMPLETION, CHOSEN, REJECTED = "completion", "chosen", "rejected"


class Answered(NamedTuple):
    """`prompt`: a string or a list of messages. `answers`: their texts, the best first."""

    prompt: Any
    answers: list[str]
    columns: dict[str, Any]


def read_answers(row: Row, config: SourceConfig, learns_from: LearnsFrom) -> Answered:
    """The prompt of a row, the answers to learn from, and its other columns. Raises DataError for a
    row that lacks one, naming the columns that it has."""
    place, values = row
    if not isinstance(values, dict):
        raise DataError(f"{place}: a row must be an object, this is {short(values)}")
    if learns_from == "pairs":
        names = [_required(values, name, place) for name in (CHOSEN, REJECTED)]
    else:
        found = pick_column(values, (COMPLETION,), config, "answer_key", place)
        names = [] if found is None else [found]
    prompt_key = pick_column(values, PROMPT_COLUMNS, config, "prompt_key", place)
    prompt = None if prompt_key is None else _checked(values, prompt_key, place)
    if names:
        given = [_checked(values, name, place) for name in names]
        split = [_split(one, name, place) for one, name in zip(given, names, strict=True)]
        prompt = _one_prompt(prompt, [before for before, _ in split], names, values, place)
        answers = [answer for _, answer in split]
        if isinstance(prompt, str) and not config.chat_template and isinstance(given[0], list):
            raise DataError(
                f"{place}: the prompt is a string, which gets no chat template, and the answer "
                f"(column {names[0]}) a message; set {config.key('chat_template')}=true, or give "
                "both as strings"
            )
    else:
        prompt, answers = _last_message(prompt, prompt_key, config, values, place)
        names = [str(prompt_key)]
    check_unanswered(prompt, place, str(prompt_key or names[0]))
    for name, answer in zip(names, answers, strict=True):
        if not answer.strip():
            raise DataError(f"{place}: the answer (column {name}) is empty")
        check_unspelled(answer, place, f"the answer (column {name})")
    _check_text_alone(values, place)
    used = {prompt_key, *names}
    return Answered(prompt, answers, {key: v for key, v in values.items() if key not in used})


def _check_text_alone(values: dict, place: str) -> None:
    """Raises DataError for what the columns of TRL's vision data hold."""
    for name in ("image", "images", "videos"):
        if values.get(name):
            raise DataError(
                f"{place}: column {name} is not given to the model: text is all that is learned "
                "from; leave such rows out, or the column"
            )


def _required(values: dict, name: str, place: str) -> str:
    if value_in(values, name) is None:
        raise DataError(
            f"{place}: no column {name!r}, and pairs need {CHOSEN} and {REJECTED}; it has "
            f"{', '.join(values) or 'none'}"
        )
    return name


def _checked(values: dict, key: str, place: str) -> Any:
    """A string, or messages."""
    value = value_in(values, key)
    if not isinstance(value, str):
        value = checked_messages(value, place, key)
    check_unicode(value, place, key)
    return value


def _split(value: Any, name: str, place: str) -> tuple[list[dict], str]:
    """(messages before the answer, the answer) of a string, or of messages that end with it."""
    if isinstance(value, str):
        return [], value
    return value[:-1], _said_by_assistant(value, name, place)


def _said_by_assistant(messages: list[dict], name: str, place: str) -> str:
    if not messages or messages[-1]["role"] != "assistant":
        last = messages[-1]["role"] if messages else "nobody"
        raise DataError(
            f"{place}: the last message of column {name} is the answer and must be the "
            f"assistant's; it is of {last}"
        )
    content = messages[-1]["content"]
    if not isinstance(content, str):
        raise DataError(
            f"{place}: the content of the last message of column {name} is {short(content)}, and "
            "an answer is text"
        )
    if more := messages[-1].keys() - {"role", "content"}:
        raise DataError(
            f"{place}: the last message of column {name} has {', '.join(sorted(more))} beside its "
            "content, which an answer of text has no place for; write it into the content"
        )
    return content


def _one_prompt(
    prompt: Any, before: list[list[dict]], names: list[str], values: dict, place: str
) -> Any:
    """The prompt's own column, or the messages before the answers, which must be the same."""
    first = before[0]
    if any(one != first for one in before):
        raise DataError(
            f"{place}: the conversations of {' and '.join(names)} differ before their last message"
        )
    if not first:
        if not prompt:
            what = "no prompt" if prompt is None else "the prompt is empty"
            raise DataError(
                f"{place}: {what}; beside {' and '.join(names)} a row needs a column "
                f"{', '.join(PROMPT_COLUMNS)}; it has {', '.join(values)}"
            )
        return prompt
    if prompt is not None and prompt not in (first, first[-1]["content"]):
        raise DataError(
            f"{place}: column {names[0]} begins with other messages than the prompt; leave one of "
            "them out"
        )
    return first


def _last_message(
    messages: Any, key: str | None, config: SourceConfig, values: dict, place: str
) -> tuple[list[dict], list[str]]:
    """(the messages before it, the answer). Raises DataError when there are no messages."""
    if not isinstance(messages, list):
        raise DataError(
            f"{place}: no answer to learn from; a row needs columns prompt and {COMPLETION}, or "
            f"messages that end with the assistant's, or {config.key('answer_key')} must name one "
            f"of its own: {', '.join(values) or 'it has none'}"
        )
    answer = _said_by_assistant(messages, str(key), place)
    if len(messages) == 1:
        raise DataError(f"{place}: column {key} has an answer alone, and nothing before it")
    return messages[:-1], [answer]
