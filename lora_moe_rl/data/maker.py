"""From a row to a prompt: chat template, system prompt, tokens, length."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from lora_moe_rl.config import SourceConfig
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.data.columns import Row, number_in, read_row, short
from lora_moe_rl.errors import DataError

log = logging.getLogger(__name__)

TEMPLATE_COLUMN = "chat_template_kwargs"


class Made(NamedTuple):
    """`text` is a string or a list of messages. `rank`: the number in the column that data.order
    names, 0 when it names none."""

    text: Any
    token_ids: list[int]
    columns: dict[str, Any]
    rank: float


class PromptMaker:
    """Makes prompts of rows: picks the columns, filters, applies the chat template, tokenises,
    checks.

    `dropped`: the rows so far whose prompt was too long, where data.too_long=drop leaves them out;
    `filtered`: those that data.filter left out.
    """

    def __init__(self, config: SourceConfig, tokenizer: Any, max_prompt_tokens: int):
        self._config, self._tokenizer = config, tokenizer
        self._max_tokens = max_prompt_tokens
        self.dropped = self.filtered = 0

    def make_all(self, rows: list[Row]) -> list[Made]:
        """Raises DataError when no row is left."""
        made = [one for row in rows if (one := self.make(row)) is not None]
        if rows and not made:
            raise DataError(
                f"{self._config.key('path')}={self._config.path}: none of the {len(rows)} rows is "
                f"left: {self.why_left_out()}"
            )
        return made

    def why_left_out(self) -> str:
        """How many rows were left out so far, and by which setting."""
        key = self._config.key
        return (
            f"{self.filtered} are outside {key('filter')}={value_text(self._config.filter)}, "
            f"{self.dropped} have prompts of more than {self._max_tokens} tokens (model.max_length "
            f"- rollout.max_response_tokens; {key('too_long')}={self._config.too_long})"
        )

    def make(self, row: Row) -> Made | None:
        """None for a row that is to be left out."""
        text, columns = read_row(row, self._config)
        place, key = row[0], self._config.key
        if not self._within(columns, place):
            self.filtered += 1
            return None
        if isinstance(text, str) and not self._config.chat_template:
            self._need_no_template(columns, place)
        token_ids = self._encode(text, columns, place)
        if len(token_ids) <= self._max_tokens:
            return Made(text, token_ids, columns, self._rank(columns, place))
        if self._config.too_long == "drop":
            self.dropped += 1
            log.info("%s: left out, its prompt has %d tokens", place, len(token_ids))
            return None
        raise DataError(
            f"{place}: the prompt has {len(token_ids)} tokens; at most {self._max_tokens} fit "
            f"(model.max_length - rollout.max_response_tokens); {key('too_long')}=drop leaves such "
            "rows out"
        )

    def _need_no_template(self, columns: dict[str, Any], place: str) -> None:
        """Raises DataError for what a prompt that gets no chat template would ignore."""
        config = self._config
        ignored = {
            f"{config.key('system_prompt')} is set": config.system_prompt,
            f"{config.key('chat_template_kwargs')} is set": config.chat_template_kwargs,
            f"there is a column {TEMPLATE_COLUMN}": columns.get(TEMPLATE_COLUMN),
        }
        for what, value in ignored.items():
            if value:
                raise DataError(
                    f"{place}: {what}, and the prompt is a string without a chat template; set "
                    f"{config.key('chat_template')}=true"
                )

    def _within(self, columns: dict[str, Any], place: str) -> bool:
        setting = self._config.key("filter")
        for name, (least, most) in self._config.filter.items():
            number = number_in(columns, name, setting, place)
            if (least is not None and number < least) or (most is not None and number > most):
                return False
        return True

    def _rank(self, columns: dict[str, Any], place: str) -> float:
        if (column := self._config.order_column) is None:
            return 0.0
        return number_in(columns, column, self._config.key("order"), place)

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
                f"give prompts as strings, without {self._config.key('chat_template')}"
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
