"""Calls are read out of what a model wrote, or refused in words that it can use."""

from __future__ import annotations

import pytest

from lora_moe_rl.environments.parts.tool_calls import Call, Form, ParseError
from lora_moe_rl.errors import ConfigError


def tagged(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("42", []),
        (tagged('{"name": "add", "arguments": {"a": 1}}'), [Call("add", named={"a": 1})]),
        ("so:\n" + tagged('\n{"name": "f"}\n') + tagged('{"name": "g"}'), [Call("f"), Call("g")]),
        (f"<think>{tagged('no')}</think>42", []),
    ],
)
def test_calls_in_json(text, calls):
    assert Form.named("json").read(text, [])[1] == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("42", []),
        ("[1, 2]", []),
        ("[]", []),
        ('[add(1, b="x")]', [Call("add", [1], {"b": "x"})]),
        (" [f([1, -2]), g()] ", [Call("f", [[1, -2]]), Call("g")]),
        ("add(1, 2)", []),
    ],
)
def test_calls_in_python(text, calls):
    assert Form.named("python").read(text, []) == ("", calls)


@pytest.mark.parametrize(
    ("text", "form", "told"),
    [
        (tagged("add(1)"), "json", "a tool call is not JSON"),
        (tagged("[1]"), "json", "not of the form"),
        (tagged('{"name": 1}'), "json", "not of the form"),
        (tagged('{"name": "f", "arguments": [1]}'), "json", "arguments of f are not"),
        ('<tool_call>{"name": "f"}', "json", "do not come in pairs"),
        (tagged("[" * 100_000), "json", "not JSON"),
        ("[add(1, 2", "python", "not a Python list of calls"),
        ("[add(x)]", "python", "not a Python list of calls"),
        ("[add(1), 2]", "python", "2 is not a call of a tool by its name"),
        ("[__import__('os').remove('x')]", "python", "is not a call of a tool by its name"),
        ("[f(**{})]", "python", "not a Python list of calls"),
        ("[f(" + "[" * 5_000, "python", "not a Python list of calls"),
    ],
)
def test_what_is_no_call_is_refused(text, form, told):
    with pytest.raises(ParseError, match=told):
        Form.named(form).read(text, [])


def test_a_model_is_told_of_its_tools_in_words_without_a_template_for_them():
    schema = {"function": {"name": "add", "parameters": {}}}
    text = Form.named("python").description([schema, schema])
    assert text.splitlines()[1] == '{"name": "add", "parameters": {}}'
    assert "Python list of calls" in text
    assert "<tool_call>" in Form.named("json").description([schema])


def test_a_form_of_ones_own_is_a_function_and_tells_the_model_how_to_call(tmp_path):
    (tmp_path / "mine.py").write_text("def f(text):\n    'Say it.'\n    return [text]\n")
    form = Form.named(f"{tmp_path}/mine.py:f")
    assert form.read("x", []) == ("", ["x"]) and form.description([]).endswith("Say it.")
    with pytest.raises(ConfigError, match="environment.calls='yaml' is none of json, python"):
        Form.named("yaml")
