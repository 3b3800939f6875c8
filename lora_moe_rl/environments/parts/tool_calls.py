"""Calls of tools in what a model wrote. Pure.

    json      <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>, anywhere in the
              turn, as often as wanted: Hermes' form, which Qwen's templates teach
    python    [add(1, b=2), add(3, 4)], the whole turn: a Python list of calls with constants
    vllm:NAME as the parser of that name in vLLM's server reads them (`vllm_calls.py`)

A turn without a call is an answer. What is in front of </think> is not looked at. Any other form is
a function of one's own, file.py:function: the text of a turn in, a list of `Call` out; it raises
ParseError for a call that it cannot read, and its docstring tells the model how to call.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import absolute_spec, load_function

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HOW = {
    "json": f'To call a tool, write {OPEN}{{"name": NAME, "arguments": {{...}}}}{CLOSE} with its '
    "name and arguments as JSON.",
    "python": "To call tools, write a Python list of calls and nothing else: [NAME(ARGUMENT=VALUE)]"
    ".",
}


VLLM = "vllm:"


def is_own(name: str) -> bool:
    """Whether it names a function, file.py:function."""
    return ":" in name and not name.startswith(VLLM)


def absolute_calls(name: str) -> dict[str, str]:
    """What of `environment.calls` is a place in files, as it is from any directory."""
    return {"calls": absolute_spec(name)} if is_own(name) else {}


class ParseError(Exception):
    """Raised for a call that cannot be read; the message is told to the model."""


@dataclass(frozen=True)
class Call:
    """A tool's name, and what it is called with. `id`: what the model itself calls the call."""

    name: str
    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    id: str | None = None


def arguments_of(call: Call, schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By their names, which those by position have of the tool's schema. Raises ParseError for more
    of them than the tool has."""
    if not call.positional:
        return dict(call.named)
    functions = [tool["function"] for tool in schemas if tool["function"]["name"] == call.name]
    parameters = functions[0].get("parameters") if functions else None
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    names = list(properties or {})
    if len(names) < len(call.positional):
        raise ParseError(f"{call.name} has {len(call.positional)} arguments by position")
    return dict(zip(names, call.positional, strict=False)) | call.named


@dataclass(frozen=True)
class Form:
    """How a model calls. `how` tells it so; `read` takes the text of a turn and the schemas of the
    tools, and returns what is said in front of the calls, where that can be told, and the calls in
    order, none for an answer. `special`: the text is that with the turn's special tokens."""

    how: str
    read: Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[Call]]]
    special: bool = False

    @classmethod
    def named(cls, name: str, tokenizer: Any = None) -> Form:
        """json, python, vllm:NAME, of which the model's tokenizer is asked, or file.py:function.
        Raises ConfigError for another name, and for what cannot be imported."""
        if name.startswith(VLLM):
            from lora_moe_rl.environments.parts import vllm_calls

            read = vllm_calls.reader(name.removeprefix(VLLM), tokenizer)
            return cls("Call them as you were trained to.", read, special=True)
        if is_own(name):
            function = load_function(name)
            how = (function.__doc__ or "").strip()
            return cls(how, lambda text, schemas: ("", function(text)))
        if name not in HOW:
            raise ConfigError(
                f"environment.calls={name!r} is none of {', '.join(HOW)}; a parser of vLLM's is "
                f"{VLLM}NAME, a form of your own file.py:function"
            )
        if name == "python":
            return cls(HOW[name], lambda text, schemas: ("", calls_in_python(text)))
        return cls(
            HOW[name], lambda text, schemas: (text.partition(OPEN)[0].rstrip(), calls_in_json(text))
        )

    def text_of(self, tokenizer: Any, text: str, token_ids: Iterable[int]) -> str:
        """What `read` takes, of a turn's text and tokens."""
        if not self.special:
            return text
        return tokenizer.decode([int(one) for one in token_ids], skip_special_tokens=False)

    def description(self, schemas: list[dict[str, Any]]) -> str:
        """For the system prompt of a model whose chat template does not tell of tools."""
        lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in schemas]
        return "\n".join(["You can call these tools:", *lines, self.how])


def calls_in_json(text: str) -> list[Call]:
    """Raises ParseError."""
    said = text.rpartition("</think>")[2]
    written, rest, at = [], [], 0
    while (start := said.find(OPEN, at)) >= 0 and (end := said.find(CLOSE, start)) >= 0:
        written.append(said[start + len(OPEN) : end])
        rest.append(said[at:start])
        at = end + len(CLOSE)
    rest.append(said[at:])
    found = [_from_json(one) for one in written]
    if any(OPEN in one or CLOSE in one for one in rest):
        raise ParseError(f"{OPEN} and {CLOSE} do not come in pairs")
    return found


def _from_json(text: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"a tool call is not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ParseError('a tool call is not of the form {"name": NAME, "arguments": {...}}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ParseError(f"the arguments of {value['name']} are not a JSON object")
    return Call(value["name"], named=arguments)


def calls_in_python(text: str) -> list[Call]:
    """A list that holds no call, as [1, 2], is an answer. Raises ParseError."""
    said = text.rpartition("</think>")[2].strip()
    if not said.startswith("["):
        return []
    try:
        tree = ast.parse(said, mode="eval").body
        items = tree.elts if isinstance(tree, ast.List) else []
        if not any(isinstance(item, ast.Call) for item in items):
            return []
        return [_from_python(item) for item in items]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ParseError(f"not a Python list of calls with constants: {error}") from error


def _from_python(item: ast.expr) -> Call:
    if not (isinstance(item, ast.Call) and isinstance(item.func, ast.Name)):
        raise ValueError(f"{ast.unparse(item)} is not a call of a tool by its name")
    if any(keyword.arg is None for keyword in item.keywords):
        raise ValueError("**arguments")
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in item.keywords}
    return Call(item.func.id, [ast.literal_eval(value) for value in item.args], named)
