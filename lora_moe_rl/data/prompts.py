"""Prompts from a JSONL or parquet file, a hub data set or a generator: endless and resumable."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lora_moe_rl.config import DataConfig
from lora_moe_rl.config.importing import load_function
from lora_moe_rl.data.columns import Row, read_row, short
from lora_moe_rl.data.fingerprint import FIRST_ROWS, content_of
from lora_moe_rl.data.rows import read_rows
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import ConfigError, DataError

log = logging.getLogger(__name__)

MAX_LEFT_OUT = 10_000
TEMPLATE_COLUMN = "chat_template_kwargs"
Made = tuple[Any, list[int], dict[str, Any]]  # a prompt's text, token ids and columns


class PromptSource:
    """The prompts of a run, in order.

    Rows of a file are shuffled anew in each epoch, by `seed` and epoch; rows of a generator come as
    it gives them, and it is called again when it ends. A generator that has a parameter `seed` is
    given the run's. Raises DataError for rows that make no prompt (those of a file are checked
    here, those of a generator when they are drawn), ConfigError for settings that name no data.
    `rows`: those of data.path, where they were read before.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        seed: int,
        max_prompt_tokens: int,
        rows: list[Row] | None = None,
    ):
        require_data(config)
        self._maker = PromptMaker(config, tokenizer, max_prompt_tokens)
        self._config, self._seed = config, seed
        self._epoch, self._position, self._drawn = 0, 0, 0
        if config.path is not None:
            rows = read_rows(config) if rows is None else rows
            self._content = content_of(values for _, values in rows)
            self._rows = self._maker.make_all(rows)
            self._order = self._shuffled()
        else:
            self._stream = self._open_stream()

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        return [self._next() for _ in range(n)]

    @property
    def dropped(self) -> int:
        """Rows left out so far because their prompts are too long (data.too_long=drop)."""
        return self._maker.dropped

    def lengths(self) -> list[int]:
        """Tokens of each prompt of a file; of a generator's first."""
        if self._config.path is not None:
            return [len(token_ids) for _, token_ids, _ in self._rows]
        return [len(prompt.token_ids) for prompt in self.peek(FIRST_ROWS)]

    def peek(self, n: int) -> list[Prompt]:
        """The next `n` prompts, which `next` gives again."""
        state, dropped = self.state_dict(), self._maker.dropped
        prompts = self.next(n)
        self.load_state_dict(state)
        self._maker.dropped = dropped
        return prompts

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
        """Goes on past rows that are left out. Raises DataError when a whole pass has
        none, or too many in a row are left out (a generator may never end)."""
        left_out = 0
        for _ in range(2):
            for row in self._stream:
                made = self._maker.make((f"{self._config.generator}, row {self._position}", row))
                if made is not None:
                    return made
                self._position += 1
                left_out += 1
                if left_out == MAX_LEFT_OUT:
                    break
            if not self._position or left_out == MAX_LEFT_OUT:
                break
            self._epoch, self._position = self._epoch + 1, 0
            self._stream = self._open_stream()
        too_long = f" but {left_out} that are too long (data.too_long=drop)" if left_out else ""
        raise DataError(f"data.generator={self._config.generator} gave no rows{too_long}")

    def _open_stream(self) -> Iterator[Any]:
        return open_generator(self._config, self._seed)

    def _shuffled(self) -> np.ndarray:
        """The order of this epoch's rows."""
        if not self._config.shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._rows))


def require_data(config: DataConfig) -> None:
    """Raises ConfigError when settings name no data, or two."""
    if (config.path is None) == (config.generator is None):
        raise ConfigError(
            "data.path and data.generator are both set; remove one of them"
            if config.path
            else "there is no data: set data.path or data.generator"
        )


def open_generator(config: DataConfig, seed: int) -> Iterator[Any]:
    """The rows of data.generator, from the first."""
    assert config.generator is not None
    generate = load_function(config.generator)
    takes_seed = "seed" in inspect.signature(generate).parameters
    rows: Iterable[Any] = generate(**({"seed": seed} if takes_seed else {}))
    return islice(rows, config.limit)


class PromptMaker:
    """Makes prompts of rows: picks the columns, applies the chat template, tokenises, checks.

    `dropped`: the rows so far whose prompt was too long, where data.too_long=drop leaves them out.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, max_prompt_tokens: int):
        self._config, self._tokenizer = config, tokenizer
        self._max_tokens = max_prompt_tokens
        self.dropped = 0

    def make_all(self, rows: list[Row]) -> list[Made]:
        """Raises DataError when no row is left."""
        made = [one for row in rows if (one := self.make(row)) is not None]
        if rows and not made:
            raise DataError(
                f"data.path={self._config.path}: all {len(rows)} prompts are longer than "
                f"{self._max_tokens} tokens (model.max_length - rollout.max_response_tokens) and "
                "data.too_long=drop leaves them out"
            )
        return made

    def make(self, row: Row) -> Made | None:
        """None for a prompt that is too long and is to be left out."""
        text, columns = read_row(row, self._config)
        place = row[0]
        if isinstance(text, str) and self._config.system_prompt and not self._config.chat_template:
            raise DataError(
                f"{place}: data.system_prompt is set, and the prompt is a string without a chat "
                "template; set data.chat_template=true"
            )
        token_ids = self._encode(text, columns, place)
        if len(token_ids) <= self._max_tokens:
            return text, token_ids, columns
        if self._config.too_long == "drop":
            self.dropped += 1
            log.info("%s: left out, its prompt has %d tokens", place, len(token_ids))
            return None
        raise DataError(
            f"{place}: the prompt has {len(token_ids)} tokens; at most {self._max_tokens} fit "
            "(model.max_length - rollout.max_response_tokens); data.too_long=drop leaves such "
            "rows out"
        )

    def _with_system(self, messages: list[dict]) -> list[dict]:
        system = self._config.system_prompt
        if system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": system}, *messages]

    def _encode(self, text: Any, columns: dict[str, Any], place: str) -> list[int]:
        messages = text
        if isinstance(text, str):
            messages = [{"role": "user", "content": text}] if self._config.chat_template else None
        if messages is None:
            token_ids = self._tokenizer.encode(text)
        else:
            rendered = self._from_template(self._with_system(messages), columns, place)
            token_ids = self._tokenizer.encode(rendered, add_special_tokens=False)
        if not token_ids:
            raise DataError(
                f"{place}: the model's tokenizer makes no tokens of the prompt, {short(text)}; "
                "leave the row out, or write another prompt"
            )
        return token_ids

    def _from_template(self, messages: list[dict], columns: dict[str, Any], place: str) -> str:
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{place}: the prompt needs a chat template and the model's tokenizer has none; "
                "give prompts as strings, without data.chat_template"
            )
        own = columns.get(TEMPLATE_COLUMN) or {}
        if not isinstance(own, dict):
            raise DataError(f"{place}: {TEMPLATE_COLUMN} must be an object, this is {short(own)}")
        more = self._config.chat_template_kwargs | own
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **more
            )
        except Exception as error:  # of Jinja, and what a template raises itself
            raise DataError(
                f"{place}: the model's chat template refuses the prompt: {error}"
            ) from error
