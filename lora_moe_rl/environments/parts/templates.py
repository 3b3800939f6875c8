"""What a model is told in its own chat template: its tools at the start, answers between its turns.

Nothing that was sampled is rendered: only the text between one turn and the next is, and tokenised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any

from lora_moe_rl.environments.parts.tool_calls import Form
from lora_moe_rl.errors import ConfigError

TRIAL = "48151623"


class Introduced:
    """A tokenizer whose chat template also tells of tools: by itself where it knows how, else at
    the end of the system prompt. All else is the tokenizer's."""

    def __init__(self, tokenizer: Any, schemas: Sequence[dict[str, Any]], form: Form):
        self._tokenizer, self.schemas = tokenizer, list(schemas)
        self.chat_template = tokenizer.chat_template
        self.in_template = bool(schemas) and self._knows_tools()
        self._told = "" if self.in_template or not schemas else form.description(self.schemas)

    @property
    def about(self) -> str:
        """Which tools they are, and who tells the model of them."""
        names = ", ".join(schema["function"]["name"] for schema in self.schemas)
        where = "its chat template" if self.in_template else "the system prompt"
        told = f", of which {where} tells in a chat" if self.chat_template is not None else ""
        return f"tools {names}{told}" if self.schemas else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """Raises ConfigError when `kwargs` have tools of their own."""
        if "tools" in kwargs:
            raise ConfigError(
                "chat_template_kwargs has tools, and so has environment.tools: leave them out there"
            )
        if self.in_template:
            kwargs["tools"] = self.schemas
        if self._told:
            system = [dict(m) for m in messages[:1] if m["role"] == "system"]
            before = f"{system[0]['content']}\n\n" if system else ""
            rest = messages[1:] if system else messages
            messages = [{"role": "system", "content": before + self._told}, *rest]
        return self._tokenizer.apply_chat_template(messages, **kwargs)

    def _knows_tools(self) -> bool:
        if self.chat_template is None:
            return False
        asked = [{"role": "user", "content": TRIAL}]

        def render(**more: Any) -> str:
            return self._tokenizer.apply_chat_template(asked, tokenize=False, **more)

        try:
            return render(tools=self.schemas) != render()
        except Exception as error:  # of Jinja, and what a template raises itself
            raise ConfigError(f"the model's chat template refuses the tools: {error}") from error


def unsaid(messages: Sequence[Mapping[str, Any]]) -> str:
    """What stands for a turn of the policy, which is not rendered: a text that is in none of these
    messages, and that nobody knows who writes one."""
    shown = repr(messages)
    while (mark := token_hex(8)) in shown:
        pass
    return mark


def between_turns(
    render: Callable[[list[dict[str, Any]], bool], str],
    last: str | None,
    messages: Sequence[Mapping[str, Any]],
    names: Sequence[str],
) -> str | None:
    """What a chat template writes between a turn of the policy and its next: of `messages`, which
    came between. `last`: what ended the turn, which is not there twice. A template that refuses an
    answer to a call that it was not shown (GPT-OSS's, MiniMax-M2's) is shown one of each of
    `names`. `render` is told whether the assistant is to begin a turn at the end. None when it does
    not show what an assistant says; raises what it raises."""
    asked, came = {"role": "user", "content": TRIAL}, [dict(message) for message in messages]
    mark = unsaid(came)
    try:
        text = render([asked, {"role": "assistant", "content": mark}, *came], True)
    except Exception:
        if not names:
            raise
        calls = [{"type": "function", "function": {"name": n, "arguments": {}}} for n in names]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        text, shown = render([asked, turn, *came], True), render([asked, turn], False)
        if not text.startswith(shown):
            return None
        _, ends, rest = shown.rpartition(last) if last else ("", "", "")
        line = rest if ends and not rest.strip() else ""  # what follows the end of a turn
        return line + text.removeprefix(shown)
    _, found, after = text.rpartition(mark)
    return after.removeprefix(last or "") if found else None


class Between:
    """The tokens between one turn of the policy and the next. `role`: of what tools answer in a
    chat; `in_line`: how an answer stands in plain text, with {answer} in its place.

    Raises ConfigError for a chat template that does not show what such a message says.
    """

    def __init__(self, tokenizer: Any, role: str, in_line: str):
        self.tokenizer, self.role, self.in_line = tokenizer, role, in_line
        if "{answer}" not in in_line:
            raise ConfigError(f"environment.answer_in_text={in_line!r} has no {{answer}} in it")
        if tokenizer.chat_template is not None:
            self._checked(None, [{"content": TRIAL}], {})

    def in_chat(
        self,
        last: int | None,
        answers: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> list[int]:
        """Of a prompt that was made by the chat template, with `kwargs`. `last`: the token that
        ended the turn; where the template would write the same, it is not there twice. `answers`:
        each with its content, and of a call the tool's name, and its id where it has one."""
        return self._encode(self._checked(last, answers, kwargs))

    def in_text(self, contents: Sequence[str]) -> list[int]:
        """Of a prompt that is plain text; several answers stand in lines of their own."""
        return self._encode(self.in_line.replace("{answer}", "\n".join(contents)))

    def _checked(
        self,
        last: int | None,
        answers: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> str:
        told = [{**self._about(answer), "role": self.role} for answer in answers]
        names = [str(answer["name"]) for answer in answers if "name" in answer]

        def render(messages: list[dict[str, Any]], begins: bool) -> str:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=begins, **kwargs
            )

        ended = None if last is None else self.tokenizer.decode([last])
        try:
            after = between_turns(render, ended, told, names or ["tool"])
        except Exception as error:  # of Jinja, and what a template raises itself
            raise ConfigError(
                f"the model's chat template refuses a message of the role {self.role}: {error}; "
                "set environment.answer_role to one that it knows (user)"
            ) from error
        trial = [answer["content"] for answer in answers] == [TRIAL]
        if after is None or (trial and TRIAL not in after):
            raise ConfigError(
                f"the model's chat template does not show what a message of the role {self.role} "
                "says; set environment.answer_role to one that it knows (user)"
            )
        return after

    def _about(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        return answer if self.role == "tool" else {"content": answer["content"]}

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
