"""From a row to a prompt: chat template, system prompt, tokens, length; with the row's own answers,
where those are learned from.

    prompt    <|user|>23+58=<|assistant|>      as a rollout would begin
    answer    81<|end|>                        what an engine should have sampled then

Both are tokenised by themselves: no token reaches from one into the other, as in a rollout.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from lora_moe_rl.config import EvalSetConfig, LearnsFrom, SourceConfig
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.data.answer_tokens import AnswerTokens, check_whole
from lora_moe_rl.data.answers import read_answers
from lora_moe_rl.data.columns import Row, number_in, read_row, short
from lora_moe_rl.data.samples import Answer, num_tokens
from lora_moe_rl.errors import DataError
from lora_moe_rl.models.tokenizer import foreign_ids, model_vocab_size

log = logging.getLogger(__name__)

TEMPLATE_COLUMN, TOOLS_COLUMN = "chat_template_kwargs", "tools"
MARK = "0f5c9e1d7a"  # what no message says
NOT_BY_CHANCE = 12  # characters; a shorter text may stand in a prompt that leaves it out


@dataclass(frozen=True)
class Wanted:
    """What of a row is learned from. `ends`: ids of the tokens that end a response, as the model's
    files name them; needed where there are answers."""

    learns_from: LearnsFrom = "rollouts"
    ends: frozenset[int] = frozenset()


class Made(NamedTuple):
    """`text` is a string or a list of messages. `rank`: the number in the column that data.order
    names, 0 when it names none. `number`: of the row among all of its data."""

    text: Any
    token_ids: list[int]
    columns: dict[str, Any]
    rank: float
    answers: tuple[Answer, ...] = ()
    number: int = 0

    @property
    def tokens(self) -> int:
        return num_tokens(self.token_ids, self.answers)


class PromptMaker:
    """Makes prompts of rows: picks the columns, filters, applies the chat template, tokenises,
    checks.

    `dropped`: the rows so far whose prompt was too long, where data.too_long=drop leaves them out;
    `filtered`: those that data.filter left out.
    """

    def __init__(
        self, config: SourceConfig, tokenizer: Any, max_tokens: int, wanted: Wanted | None = None
    ):
        """`max_tokens`: of a prompt; where answers are wanted, of a prompt with its answer."""
        self._config, self._tokenizer = config, tokenizer
        self._max_tokens, self._wanted = max_tokens, wanted or Wanted()
        self._answers = AnswerTokens(tokenizer, self._wanted.ends)
        self._what, self._bound = "prompt", "model.max_length - rollout.max_response_tokens"
        if isinstance(config, EvalSetConfig) and config.max_response_tokens is not None:
            self._bound = f"model.max_length - {config.key('max_response_tokens')}"
        if self._wanted.learns_from != "rollouts":
            self._what, self._bound = "prompt-and-answer", "model.max_length"
        self.dropped = self.filtered = 0

    def make_all(self, rows: list[Row]) -> list[Made]:
        """Raises DataError when no row is left."""
        numbered = ((n, self.make(row)) for n, row in enumerate(rows))
        made = [one._replace(number=n) for n, one in numbered if one is not None]
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
            f"{self.dropped} have {self._what}s of more than {self._max_tokens} tokens "
            f"({self._bound}; {key('too_long')}={self._config.too_long})"
        )

    def make(self, row: Row) -> Made | None:
        """None for a row that is to be left out."""
        place, key, learns_from = row[0], self._config.key, self._wanted.learns_from
        if learns_from == "rollouts":
            (text, columns), answers = read_row(row, self._config), []
        else:
            text, answers, columns = read_answers(row, self._config, learns_from)
        if not self._within(columns, place):
            self.filtered += 1
            return None
        if isinstance(text, str) and not self._config.chat_template:
            self._need_no_template(columns, place)
        token_ids = self.encode(text, columns, place)
        wanted = tuple(self._answer(text, answer, columns, place) for answer in answers)
        if learns_from == "pairs" and wanted[0].token_ids == wanted[1].token_ids:
            raise DataError(
                f"{place}: both answers of the pair are the same tokens, of which nothing can be "
                f"learned: {short(answers[0])}; leave the row out"
            )
        made = Made(text, token_ids, columns, 0.0, wanted)
        if made.tokens <= self._max_tokens:
            return made._replace(rank=self._rank(columns, place))
        if self._config.too_long == "drop":
            self.dropped += 1
            log.info("%s: left out, its %s has %d tokens", place, self._what, made.tokens)
            return None
        raise DataError(
            f"{place}: the {self._what} has {made.tokens} tokens; at most {self._max_tokens} fit "
            f"({self._bound}); {key('too_long')}=drop leaves such rows out"
        )

    def _need_no_template(self, columns: dict[str, Any], place: str) -> None:
        """Raises DataError for what a prompt that gets no chat template would ignore."""
        config = self._config
        ignored = {
            f"{config.key('system_prompt')} is set": config.system_prompt,
            f"{config.key('chat_template_kwargs')} is set": config.chat_template_kwargs,
            f"there is a column {TEMPLATE_COLUMN}": columns.get(TEMPLATE_COLUMN),
            f"there is a column {TOOLS_COLUMN}": self._tools(columns, place),
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

    def _messages(self, text: Any) -> list[dict] | None:
        """What the chat template is given; None for a string that gets none."""
        if not isinstance(text, str):
            return self._with_system(text)
        if not self._config.chat_template:
            return None
        return self._with_system([{"role": "user", "content": text}])

    def encode(self, text: Any, columns: dict[str, Any], place: str) -> list[int]:
        """The tokens of a prompt, rendered by the chat template where it gets one. Raises
        DataError."""
        messages = self._messages(text)
        if messages is None:
            token_ids = self._of_string(text, place)
        else:
            rendered = self._from_template(messages, columns, place)
            token_ids = self._tokenizer.encode(rendered, add_special_tokens=False)
        if not token_ids:
            raise DataError(
                f"{place}: the model's tokenizer makes no tokens of the prompt, {short(text)}; "
                "leave the row out, or write another prompt"
            )
        self._check_known(token_ids, "prompt", place)
        return token_ids

    def _check_known(self, token_ids: list[int], what: str, place: str) -> None:
        """Raises DataError for a token that the tokenizer has and the model lacks."""
        if foreign := foreign_ids(self._tokenizer, token_ids):
            raise DataError(
                f"{place}: the {what} has the token {self._tokenizer.decode(foreign[:1])!r} of the "
                f"id {foreign[0]}, and the model has those below "
                f"{model_vocab_size(self._tokenizer)} (vocab_size in its config.json): it was "
                "added to the tokenizer alone; leave it out of the row and of the chat template, "
                "or give the model an embedding of it (resize_token_embeddings of transformers)"
            )

    def _of_string(self, text: str, place: str) -> list[int]:
        """The tokens of a string, with those that the tokenizer puts in front, and without an end,
        behind which a rollout would begin."""
        token_ids, bos = self._tokenizer.encode(text), self._tokenizer.bos_token_id
        if bos is not None and token_ids[:2] == [bos, bos]:
            raise DataError(
                f"{place}: the prompt begins with {self._tokenizer.bos_token!r} twice, since the "
                "model's tokenizer puts one before every text; leave it out of the prompt"
            )
        eos = self._tokenizer.eos_token
        if eos and token_ids[-1:] == [self._tokenizer.eos_token_id] and not text.endswith(eos):
            del token_ids[-1]
        return token_ids

    def _tools(self, columns: dict[str, Any], place: str) -> list[Any] | None:
        """The tools of a row to learn answers from, for its chat template: a list, or the JSON of
        one. In rollouts the environment has them."""
        tools = columns.get(TOOLS_COLUMN)
        if tools is None or self._wanted.learns_from == "rollouts":
            return None
        if isinstance(tools, str):
            with suppress(ValueError):  # it is no list
                tools = json.loads(tools)
        if not isinstance(tools, list):
            raise DataError(
                f"{place}: column {TOOLS_COLUMN} must be a list of tools, as JSON schemas, or the "
                f"JSON of one; this is {short(tools)}"
            )
        return tools or None

    def _answer(self, text: Any, answer: str, columns: dict[str, Any], place: str) -> Answer:
        """What an engine should have sampled: the answer as the chat template renders it behind the
        prompt, up to the token that ends it; without a template the string and that token."""
        messages, rest = self._messages(text), answer
        if messages is not None:
            before = self._from_template(messages, columns, place)
            turn = {"role": "assistant", "content": answer}
            whole = self._from_template([*messages, turn], columns, place, answered=True)
            if not whole.startswith(before):
                raise DataError(
                    f"{place}: the model's chat template ends a prompt with {short(before[-40:])}, "
                    "and renders the conversation with its answer otherwise, so that no rollout "
                    "could come to it; give the prompt and the answer as strings, as the model "
                    "should see and write them"
                )
            rest = whole[len(before) :]
            check_whole(answer, rest, place)
        token_ids = self._answers.of(rest, messages is not None, place)
        self._check_known(token_ids, "answer", place)
        return Answer(answer, token_ids)

    def _from_template(
        self, messages: list[dict], columns: dict[str, Any], place: str, answered: bool = False
    ) -> str:
        """Up to where the assistant begins to write, or to the end of what it has `answered`."""
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{place}: the prompt needs a chat template and the model's tokenizer has none; "
                f"set model.chat_template, or give prompts as strings, without "
                f"{self._config.key('chat_template')}"
            )
        own = columns.get(TEMPLATE_COLUMN) or {}
        if not isinstance(own, dict):
            raise DataError(f"{place}: {TEMPLATE_COLUMN} must be an object, this is {short(own)}")
        # Of parquet a key that another row has is null here, and says nothing.
        more = self._config.chat_template_kwargs | {k: v for k, v in own.items() if v is not None}
        if (tools := self._tools(columns, place)) is not None:
            more["tools"] = tools

        def render(messages: list[dict], **settings: Any) -> str:
            return self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not answered,
                **more | settings,
            )

        try:
            rendered = render(messages)
            if tools is not None and rendered == render(messages, tools=None):
                raise ValueError(f"it has no place for the tools of column {TOOLS_COLUMN}")
        except Exception as error:  # of Jinja, and what a template raises itself
            raise DataError(
                f"{place}: the model's chat template refuses the prompt: {error}"
            ) from error
        check_shown(messages, rendered, render, place)
        return rendered


def check_shown(
    messages: list[dict], rendered: str, render: Callable[[list[dict]], str], place: str
) -> None:
    """Raises DataError for a message that the chat template leaves out: many pass over roles that
    they do not know. Turns of the assistant and of tools may be written otherwise, and any text may
    be: it is left out when nothing changes with it."""
    for i, message in enumerate(messages):
        said = (message["content"] or "").strip()  # None of a turn that is calls of tools alone
        if not said or message["role"] in ("assistant", "tool"):
            continue
        if len(said) >= NOT_BY_CHANCE and said in rendered:
            continue
        changed = {**message, "content": f"{MARK} {message['content']} {MARK}"}
        try:
            left_out = render([*messages[:i], changed, *messages[i + 1 :]]) == rendered
        except Exception:  # of a template that looks into the text
            left_out = False
        if left_out:
            raise DataError(
                f"{place}: the model's chat template leaves out what {message['role']!r} says, "
                f"{short(message['content'])}: its role is none that the template knows (system, "
                "user, assistant, as a rule), or the template has no place for it; mend the row, "
                "or give a template that shows it (model.chat_template_file)"
            )
