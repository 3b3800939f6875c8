"""From a row to a prompt: chat template, system prompt, tokens, length."""

from __future__ import annotations

import logging
from typing import Any

from lora_moe_rl.config import SourceConfig
from lora_moe_rl.data.columns import Row, read_row, short
from lora_moe_rl.errors import DataError

log = logging.getLogger(__name__)

TEMPLATE_COLUMN = "chat_template_kwargs"
Made = tuple[Any, list[int], dict[str, Any]]  # a prompt's text, token ids and columns


class PromptMaker:
    """Makes prompts of rows: picks the columns, applies the chat template, tokenises, checks.

    `dropped`: the rows so far whose prompt was too long, where data.too_long=drop leaves them out.
    """

    def __init__(self, config: SourceConfig, tokenizer: Any, max_prompt_tokens: int):
        self._config, self._tokenizer = config, tokenizer
        self._max_tokens = max_prompt_tokens
        self.dropped = 0

    def make_all(self, rows: list[Row]) -> list[Made]:
        """Raises DataError when no row is left."""
        key = self._config.key
        made = [one for row in rows if (one := self.make(row)) is not None]
        if rows and not made:
            raise DataError(
                f"{key('path')}={self._config.path}: all {len(rows)} prompts are longer than "
                f"{self._max_tokens} tokens (model.max_length - rollout.max_response_tokens) and "
                f"{key('too_long')}=drop leaves them out"
            )
        return made

    def make(self, row: Row) -> Made | None:
        """None for a prompt that is too long and is to be left out."""
        text, columns = read_row(row, self._config)
        place, key = row[0], self._config.key
        if isinstance(text, str) and self._config.system_prompt and not self._config.chat_template:
            raise DataError(
                f"{place}: {key('system_prompt')} is set, and the prompt is a string without a "
                f"chat template; set {key('chat_template')}=true"
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
            f"(model.max_length - rollout.max_response_tokens); {key('too_long')}=drop leaves such "
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
