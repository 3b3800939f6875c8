"""Prompts from a JSONL or parquet file, a hub data set or a generator: endless and resumable."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lora_moe_rl.config import DataConfig
from lora_moe_rl.config.importing import load_function
from lora_moe_rl.data.fingerprint import FIRST_ROWS, content_of
from lora_moe_rl.data.rows import read_rows
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import ConfigError, DataError

PROMPT_COLUMNS = ("prompt", "messages", "question")
ANSWER_COLUMNS = ("answer", "solution", "label", "ground_truth", "reward_model.ground_truth")

Row = tuple[str, dict[str, Any]]  # where it stands ("data.jsonl, line 3"), and its values
Made = tuple[Any, list[int], dict[str, Any]]  # a prompt's text, token ids and columns


class PromptSource:
    """The prompts of a run, in order.

    Rows of a file are shuffled anew in each epoch, by `seed` and epoch; rows of a generator come as
    it gives them, and it is called again when it ends. A generator that has a parameter `seed` is
    given the run's. Raises DataError for rows that make no prompt (those of a file are checked
    here, those of a generator when they are drawn), ConfigError for settings that name no data.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, seed: int, max_prompt_tokens: int):
        generator = config.generator
        if (config.path is None) == (generator is None):
            raise ConfigError(
                "data.path and data.generator are both set; remove one of them"
                if config.path
                else "there is no data: set data.path or data.generator"
            )
        self._maker = PromptMaker(config, tokenizer, max_prompt_tokens)
        self._config, self._seed = config, seed
        self._epoch, self._position, self._drawn = 0, 0, 0
        if config.path is not None:
            rows = read_rows(config)
            self._content = content_of(values for _, values in rows)
            self._rows = self._maker.make_all(rows)
            self._order = self._shuffled()
        elif generator is not None:
            self._generate = load_function(generator)
            self._stream = self._open_stream()

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        return [self._next() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, in a form that JSON can hold."""
        position = {"epoch": self._epoch, "position": self._position, "drawn": self._drawn}
        return position | self._identity()

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a run goes on: how many rows, what is in them (of a generator,
        in the first), and the seed of their order."""
        if self._config.path is not None:
            return {"rows": len(self._rows), "content": self._content, "seed": self._seed}
        content = content_of(islice(self._open_stream(), FIRST_ROWS))
        return {"rows": None, "content": content, "seed": self._seed}

    def _check_same(self, state: dict[str, Any]) -> None:
        """Raises DataError that says what is not as it was. A checkpoint from before there were
        fingerprints has none to compare."""
        data, now = self._config.path or self._config.generator, self._identity()
        way_out = "restore it, or start a new run with logging.run_dir=DIR"
        if state["rows"] != now["rows"]:
            raise DataError(
                f"the data had {state['rows']} rows when the checkpoint was written and {data} has "
                f"{now['rows']}: {way_out}"
            )
        if state.get("seed", self._seed) != self._seed:
            raise DataError(
                f"seed was {state['seed']} when the checkpoint was written and is now {self._seed}:"
                f" {way_out}"
            )
        # A generator that gives other rows each time, whatever the seed, has no content to compare.
        if state.get("content", now["content"]) != now["content"] == self._identity()["content"]:
            raise DataError(
                f"the rows of {data} are not those of when the checkpoint was written (as many, "
                f"but others; data.subset, data.split and data.limit choose them too): {way_out}"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another source stood. Raises DataError when the data are not the same."""
        self._check_same(state)
        self._epoch, self._position = state["epoch"], state["position"]
        self._drawn = state["drawn"]
        if self._config.path is not None:
            self._order = self._shuffled()
            return
        self._stream = self._open_stream()
        skipped = sum(1 for _ in islice(self._stream, self._position))
        if skipped < self._position:
            raise DataError(
                f"{self._config.generator} ended after {skipped} rows; it gave more than "
                f"{self._position} before the run was resumed"
            )

    def _next(self) -> Prompt:
        made = self._next_of_file() if self._config.path is not None else self._next_of_generator()
        text, token_ids, columns = made
        prompt = Prompt(self._drawn, text, list(token_ids), dict(columns))
        self._position += 1
        self._drawn += 1
        return prompt

    def _next_of_file(self) -> Made:
        if self._position == len(self._rows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        return self._rows[self._order[self._position]]

    def _next_of_generator(self) -> Made:
        row = next(self._stream, None)
        if row is None and self._position:
            self._epoch, self._position = self._epoch + 1, 0
            self._stream = self._open_stream()
            row = next(self._stream, None)
        if row is None:
            raise DataError(f"data.generator={self._config.generator} gave no rows")
        return self._maker.make((f"{self._config.generator}, row {self._position}", row))

    def _open_stream(self) -> Iterator[Any]:
        takes_seed = "seed" in inspect.signature(self._generate).parameters
        rows: Iterable[Any] = self._generate(**({"seed": self._seed} if takes_seed else {}))
        return islice(rows, self._config.limit)

    def _shuffled(self) -> np.ndarray:
        """The order of this epoch's rows."""
        if not self._config.shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._rows))


class PromptMaker:
    """Makes prompts of rows: picks the columns, applies the chat template, tokenises, checks."""

    def __init__(self, config: DataConfig, tokenizer: Any, max_prompt_tokens: int):
        self._config, self._tokenizer = config, tokenizer
        self._max_tokens = max_prompt_tokens

    def make_all(self, rows: list[Row]) -> list[Made]:
        return [self.make(row) for row in rows]

    def make(self, row: Row) -> Made:
        place, values = row
        if not isinstance(values, dict):
            raise DataError(f"{place}: a row must be an object, this is {_short(values)}")
        key = pick_column(values, PROMPT_COLUMNS, self._config.prompt_key, "prompt_key", place)
        if key is None:
            raise DataError(
                f"{place}: no prompt; a row needs a column {', '.join(PROMPT_COLUMNS)}, or "
                f"data.prompt_key must name one of its own: {', '.join(values) or 'it has none'}"
            )
        text = _lookup(values, key)
        token_ids = self._encode(text, place, key)
        if len(token_ids) > self._max_tokens:
            raise DataError(
                f"{place}: the prompt has {len(token_ids)} tokens; at most {self._max_tokens} fit "
                "(model.max_length - rollout.max_response_tokens)"
            )
        return text, token_ids, self._columns(values, key, place)

    def _columns(self, values: dict, prompt_key: str, place: str) -> dict[str, Any]:
        """All values but the prompt, for the reward; the answer also under the name `answer`."""
        columns = {key: value for key, value in values.items() if key != prompt_key}
        answer_key = pick_column(
            columns, ANSWER_COLUMNS, self._config.answer_key, "answer_key", place
        )
        if answer_key is not None:
            columns["answer"] = _lookup(columns, answer_key)
        return columns

    def _encode(self, text: Any, place: str, key: str) -> list[int]:
        if isinstance(text, str):
            messages = [{"role": "user", "content": text}] if self._config.chat_template else None
        else:
            messages = text = _checked_messages(text, place, key)
        if not text:
            raise DataError(f"{place}: the prompt (column {key}) is empty")
        _check_unicode(text, place, key)
        if messages is None:
            token_ids = self._tokenizer.encode(text)
        else:
            token_ids = self._tokenizer.encode(
                self._from_template(messages, place), add_special_tokens=False
            )
        if not token_ids:
            raise DataError(
                f"{place}: the model's tokenizer makes no tokens of the prompt (column {key}), "
                f"{_short(text)}; leave the row out, or write another prompt"
            )
        return token_ids

    def _from_template(self, messages: list[dict], place: str) -> str:
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{place}: the prompt needs a chat template and the model's tokenizer has none; "
                "give prompts as strings, without data.chat_template"
            )
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


def pick_column(
    values: dict, candidates: tuple[str, ...], chosen: str | None, key: str, place: str
) -> str | None:
    """The column that `chosen` names, or else the only candidate that the row has.

    A dot goes into a nested object: `reward_model.ground_truth`. Raises DataError when the chosen
    column is absent, or when there are several candidates; None when there is no candidate.
    """
    if chosen is not None:
        if _lookup(values, chosen) is None:
            raise DataError(
                f"{place}: no column {chosen!r} (data.{key}); it has {', '.join(values) or 'none'}"
            )
        return chosen
    found = [name for name in candidates if _lookup(values, name) is not None]
    if len(found) > 1:
        raise DataError(
            f"{place}: columns {' and '.join(found)} could both be meant; name one with "
            f"data.{key}={found[0]}"
        )
    return found[0] if found else None


def _lookup(values: dict, name: str) -> Any:
    """The value of a column, or None when it is absent or null."""
    if name in values:
        return values[name]
    value: Any = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _checked_messages(messages: Any, place: str, key: str) -> list[dict]:
    is_list = isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )
    if not is_list:
        raise DataError(
            f"{place}: the prompt (column {key}) must be a string or a list of objects with role "
            f"and content; this is {_short(messages)}"
        )
    return messages


def _check_unicode(text: Any, place: str, key: str) -> None:
    """JSON may name half of a surrogate pair, which is no character and has no UTF-8."""
    try:
        json.dumps(text, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: the prompt (column {key}) holds {error.object[error.start]!r}, half of a "
            "surrogate pair without the other, which is no character; mend or leave out the row"
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
