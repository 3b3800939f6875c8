"""The prompts of one data set: a file, a saved or a hub data set, or a generator; endless and
resumable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from lora_moe_rl.config import DataConfig, SourceConfig
from lora_moe_rl.data.columns import Row, short
from lora_moe_rl.data.fingerprint import FIRST_ROWS, content_of
from lora_moe_rl.data.generators import open_generator
from lora_moe_rl.data.maker import Made, PromptMaker, Wanted
from lora_moe_rl.data.rows import read_rows
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import ConfigError, DataError

MAX_LEFT_OUT = 10_000
LOOK_S = 1.0  # of a generator's rows before a run, beside its first
# Settings that make other prompts of the same rows; what chooses the rows shows in their content.
SHAPING = (
    "args",
    "prompt_key", "answer_key", "chat_template", "system_prompt", "chat_template_kwargs", "filter",
    "order", "limit",
)  # fmt: skip


class PromptSource:
    """The prompts of one data set, in order.

    Rows of a file come in the order of data.order, shuffled anew in each epoch by `seed` and epoch
    (also those of equal rank); rows of a generator come as
    it gives them, and it is called again when it ends. A generator that has a parameter `seed` is
    given the run's. Raises DataError for rows that make no prompt (those of a file are checked
    here, those of a generator when they are drawn), ConfigError for settings that name no data.
    `rows`: those of the file, where they were read before. `max_tokens`: of a prompt, with its
    answer where one is `wanted`.
    """

    def __init__(
        self,
        config: SourceConfig,
        tokenizer: Any,
        seed: int,
        max_tokens: int,
        rows: list[Row] | None = None,
        wanted: Wanted | None = None,
    ):
        require_data(config)
        self._maker = PromptMaker(config, tokenizer, max_tokens, wanted)
        self._config, self._seed, self._template = config, seed, tokenizer.chat_template
        self._epoch, self._position, self.drawn = 0, 0, 0
        if config.path is not None:
            rows = read_rows(config) if rows is None else rows
            self._content = content_of(values for _, values in rows)
            self._rows = self._maker.make_all(rows)
            self._ranks = np.array([made.rank for made in self._rows])
            self._order = self._epoch_order()
        else:
            self._content = self._first_content()
            self._stream = self._open_stream()

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        return [self._next() for _ in range(n)]

    @property
    def dropped(self) -> int:
        """Rows left out so far because their prompts are too long."""
        return self._maker.dropped

    @property
    def filtered(self) -> int:
        """Rows that data.filter left out so far."""
        return self._maker.filtered

    def lengths(self) -> list[int]:
        """Tokens of each prompt of a file, with its longest answer if it has any; of a generator's
        first."""
        if self._config.path is not None:
            return [made.tokens for made in self._rows]
        return [prompt.tokens for prompt in self.peek(FIRST_ROWS)]

    def peek(self, n: int) -> list[Prompt]:
        """The next `n` prompts, which `next` gives again."""
        state, maker = self.state_dict(), self._maker
        counts = maker.dropped, maker.filtered
        prompts = self.next(n)
        self.load_state_dict(state)
        maker.dropped, maker.filtered = counts
        return prompts

    def examples(self, n: int) -> list[Prompt]:
        """The next `n` prompts, to be looked at."""
        return self.peek(n)

    def repeated(self, per_step: int) -> list[str]:
        """A sentence when there are fewer prompts than a step takes, so that each step has some of
        them more than once. Of a generator that ends all its rows count; one that is still at it
        after LOOK_S is not waited for."""
        config = self._config
        if config.path is not None:
            named, found = f"{config.key('path')}={config.path}", len(self._rows)
        else:
            named = f"{config.key('generator')}={config.generator}"
            found, end = 0, time.monotonic() + LOOK_S
            for _ in islice(self._open_stream(), per_step):
                found += 1
                if time.monotonic() > end:
                    return []
        if found >= per_step:
            return []
        limit = f" ({config.key('limit')}={config.limit})" if config.limit is not None else ""
        return [
            f"{named} has {found:,} prompts{limit}, and a step takes {per_step:,}: each step has "
            "some of them more than once, each time as a group of its own"
        ]

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, in a form that JSON can hold, and what must be the same when a
        run goes on from there: how many rows, what is in them (of a generator, in the first), the
        seed of their order, and what makes prompts of them: settings and the chat template."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "drawn": self.drawn,
            "rows": self._num_rows(),
            "content": self._content,
            "seed": self._seed,
            "settings": self._settings(),
            "chat_template": self._template,
        }

    def _num_rows(self) -> int | None:
        return len(self._rows) if self._config.path is not None else None

    def _first_content(self) -> str:
        return content_of(islice(self._open_stream(), FIRST_ROWS))

    def _settings(self) -> dict[str, Any]:
        return self._config.model_dump(mode="json", include=set(SHAPING))

    def _check_same(self, state: dict[str, Any]) -> None:
        """Raises DataError that says what is not as it was. A checkpoint from before there were
        fingerprints has none to compare."""
        key, data = self._config.key, self._config.path or self._config.generator
        way_out = "restore it, or start a new run with logging.run_dir=DIR"
        if "sets" in state:
            raise DataError(
                f"there were several data sets when the checkpoint was written (data.sets="
                f"{', '.join(state['sets'])}), and now {data} is the only one: {way_out}"
            )
        if state["rows"] != self._num_rows():
            if None in (state["rows"], self._num_rows()):
                was = "a generator's" if state["rows"] is None else f"{state['rows']} of a file"
                raise DataError(
                    f"the rows were {was} when the checkpoint was written, and are now "
                    f"those of {data}: {way_out}"
                )
            raise DataError(
                f"the data had {state['rows']} rows when the checkpoint was written and {data} has "
                f"{self._num_rows()}: {way_out}"
            )
        if state.get("seed", self._seed) != self._seed:
            raise DataError(
                f"seed was {state['seed']} when the checkpoint was written and is now {self._seed}:"
                f" {way_out}"
            )
        if not self._same_content(state.get("content", self._content)):
            raise DataError(
                f"the rows of {data} are not those of when the checkpoint was written (as many, "
                f"but others; {key('subset')}, {key('split')} and {key('limit')} choose them too): "
                f"{way_out}"
            )
        for name, value in self._settings().items():
            if (was := state.get("settings", {}).get(name, value)) != value:
                raise DataError(
                    f"{key(name)} was {short(was)} when the checkpoint was written and is now "
                    f"{short(value)}: {way_out}"
                )
        if (was := state.get("chat_template", self._template)) != self._template:
            raise DataError(
                f"the chat template was {short(was)} when the checkpoint was written and is now "
                f"{short(self._template)} (model.chat_template, or the tokenizer's own): {way_out}"
            )

    def _same_content(self, before: str) -> bool:
        """A generator that gives other rows each time, whatever the seed, has no content to
        compare."""
        if before == self._content or self._config.path is not None:
            return before == self._content
        return self._first_content() != self._content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another source stood. Raises DataError when the data are not the same."""
        self._check_same(state)
        self._epoch, self._position = state["epoch"], state["position"]
        self.drawn = state["drawn"]
        if self._config.path is not None:
            self._order = self._epoch_order()
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
        prompt = Prompt(
            self.drawn,
            made.text,
            list(made.token_ids),
            dict(made.columns),
            answers=made.answers,
            data_row=made.number,
        )
        self._position += 1
        self.drawn += 1
        return prompt

    def _next_of_file(self) -> Made:
        if self._position == len(self._rows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        return self._rows[self._order[self._position]]

    def _next_of_generator(self) -> Made:
        """Goes on past rows that are left out. Raises DataError when a whole pass has
        none, or too many in a row are left out (a generator may never end)."""
        left_out = 0
        for _ in range(2):
            for row in self._stream:
                made = self._maker.make((f"{self._config.generator}, row {self._position}", row))
                if made is not None:
                    return made._replace(number=self._position)
                self._position += 1
                left_out += 1
                if left_out == MAX_LEFT_OUT:
                    break
            if not self._position or left_out == MAX_LEFT_OUT:
                break
            self._epoch, self._position = self._epoch + 1, 0
            self._stream = self._open_stream()
        named = f"{self._config.key('generator')}={self._config.generator}"
        why = f" that can be used: {self._maker.why_left_out()}" if left_out else ""
        raise DataError(f"{named} gave no rows{why}")

    def _open_stream(self) -> Iterator[Any]:
        return open_generator(self._config, self._seed)

    def _epoch_order(self) -> np.ndarray:
        """The order of this epoch's rows."""
        if self._config.order == "sequential":
            return np.arange(len(self._rows))
        order = np.random.default_rng([self._seed, self._epoch]).permutation(len(self._rows))
        if self._config.order == "shuffle":
            return order
        sign = -1 if self._config.order.startswith("by:-") else 1
        return order[np.argsort(sign * self._ranks[order], kind="stable")]


def require_data(config: SourceConfig) -> None:
    """Raises ConfigError when settings name no data, or two."""
    assert config.system_prompt_file is None, "config.recipes.resolve reads it"
    path, generator = config.key("path"), config.key("generator")
    if config.path is not None and config.generator is not None:
        raise ConfigError(f"{path} and {generator} are both set; remove one of them")
    if config.path is None and config.generator is None:
        several = ", or data.sets for several data sets" if type(config) is DataConfig else ""
        raise ConfigError(f"there is no data: set {path} or {generator}{several}")
