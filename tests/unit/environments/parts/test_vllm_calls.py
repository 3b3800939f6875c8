"""Calls in the forms that models were trained in, read by vLLM's own parsers."""

from __future__ import annotations

import pytest

from lora_moe_rl.endpoint.rendering import Chats
from lora_moe_rl.environments.external import External
from lora_moe_rl.environments.parts import vllm_calls
from lora_moe_rl.environments.parts.tool_calls import Call, Form, ParseError
from lora_moe_rl.environments.tools import Tools
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.tiny.tokenizer import make_tokenizer

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "required": ["a"],
            },
        },
    }
]
ADD = {"a": 3, "b": "x"}
# {parser: (special tokens, a turn with a call of add(3, "x"))}, as the models' templates have them
TURNS = {
    "kimi_k2": (
        ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|im_end|>"],
        'I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0'
        '<|tool_call_argument_begin|>{"a": 3, "b": "x"}<|tool_call_end|>'
        '<|tool_calls_section_end|><|im_end|>',
    ),
    "glm47": (
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
         "<think>", "</think>", "<|observation|>"],
        "I add.<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>b</arg_key>"
        "<arg_value>x</arg_value></tool_call><|observation|>",
    ),
    "deepseek_v31": (
        ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"],
        'I add.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 3, "b": "x"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "qwen3_coder": (
        ["<tool_call>", "</tool_call>"],
        "I add.<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\nx\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "minimax_m2": (
        ["<minimax:tool_call>", "</minimax:tool_call>"],
        'I add.<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">3</parameter>\n'
        '<parameter name="b">x</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "hermes": (
        ["<tool_call>", "</tool_call>"],
        'I add.<tool_call>{"name": "add", "arguments": {"a": 3, "b": "x"}}</tool_call>',
    ),
}  # fmt: skip


def tokenizer(special: list[str]):
    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": special})
    return made


@pytest.mark.parametrize("name", TURNS)
def test_a_call_is_what_vllms_server_reads(name):
    """Of a turn's tokens: the marks are special tokens, which its text has not."""
    special, written = TURNS[name]
    made = tokenizer(special)
    token_ids = made.encode(f"<think>No, add().</think>{written}", add_special_tokens=False)
    text = made.decode(token_ids, skip_special_tokens=True)
    assert not any(mark in text for mark in special)
    form = Form.named(f"vllm:{name}", made)
    whole = form.text_of(made, text, token_ids)
    said, calls = form.read(whole, SCHEMAS)
    known = "functions.add:0" if name == "kimi_k2" else None
    assert calls == [Call("add", named=ADD, id=known)]
    assert said.endswith("I add.") and not any(mark in said for mark in special)
    for answer in ("It is 7.", ""):
        assert form.read(answer, SCHEMAS)[1] == []
    assert form.read(whole.partition("</think>")[0], SCHEMAS)[1] == []
    assert form.read("It is 7.", []) == ("", [])  # of an environment without tools


def test_clients_get_a_call_under_the_id_that_the_model_gave_it():
    special, written = TURNS["kimi_k2"]
    made = tokenizer(special)
    token_ids = made.encode(written, add_special_tokens=False)
    said, calls = Chats(made, "vllm:kimi_k2").calls_in("I add.", token_ids, SCHEMAS)
    function = {"name": "add", "arguments": '{"a": 3, "b": "x"}'}
    assert said == "I add."
    assert calls == [{"id": "functions.add:0", "type": "function", "function": function}]
    assert Chats(made, "vllm:kimi_k2").calls_in("I add.", token_ids, []) == ("I add.", [])


@pytest.mark.parametrize("settings", [Tools.Settings, External.Settings])
def test_it_is_no_file_whose_place_is_looked_for(settings):
    assert "calls" not in settings.model_construct(calls="vllm:kimi_k2").absolute()


def test_two_calls_stay_in_order():
    special, written = TURNS["kimi_k2"]
    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    more = f"{begin}functions.f:1<|tool_call_argument_begin|>{{}}{end}<|tool_calls_section_end|>"
    form = Form.named("vllm:kimi_k2", tokenizer(special))
    _, calls = form.read(written.replace("<|tool_calls_section_end|>", more, 1), SCHEMAS)
    assert [(call.name, call.id) for call in calls] == [
        ("add", "functions.add:0"), ("f", "functions.f:1"),
    ]  # fmt: skip


def test_arguments_that_are_no_json_are_told_to_the_model():
    special, written = TURNS["deepseek_v31"]
    form = Form.named("vllm:deepseek_v31", tokenizer(special))
    with pytest.raises(ParseError, match="the arguments of add are not JSON"):
        form.read(written.replace('"x"}', '"x'), SCHEMAS)
    with pytest.raises(ParseError, match="the arguments of add are not a JSON object"):
        form.read(written.replace('{"a": 3, "b": "x"}', "[3]"), SCHEMAS)


# {parser: (what of its turn is written wrong, what instead)}
MALFORMED = {
    "kimi_k2": ("functions.add:0", "add"),
    "glm47": ("<tool_call>add<arg_key>", "<tool_call><arg_key>"),
    "deepseek_v31": ("<｜tool▁sep｜>", ""),
    "qwen3_coder": ("<function=add>", "add"),
    "minimax_m2": ('<invoke name="add">', "add"),
    "hermes": ('"name": "add"', "name: add"),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_call_that_was_begun_and_is_none_cannot_be_read(name):
    """The parser takes it for an answer; nothing is a call that stands before </think>."""
    special, written = TURNS[name]
    form = Form.named(f"vllm:{name}", tokenizer(special))
    right, wrong = MALFORMED[name]
    broken = written.replace(right, wrong)
    assert broken != written
    with pytest.raises(ParseError, match="a call was begun and could not be read"):
        form.read(broken, SCHEMAS)
    assert form.read(f"{broken}</think>It is 7.", SCHEMAS) == ("", [])
    assert Chats(tokenizer(special), f"vllm:{name}").calls_in("I", [], SCHEMAS) == ("I", [])


# The parsers of vLLM that look for no mark of their own, of which nothing can be told.
UNMARKED = ("cohere_command3", "cohere_command4", "gigachat3", "internlm", "llama4_pythonic",
            "muse_glimmer", "olmo3", "openai", "phi4_mini_json", "pythonic", "xlam")  # fmt: skip
NEEDED = ["[TOOL_CALLS]", "<tool_calls>", "</tool_calls>", "<|python_tag|>", "<|tool_call_start|>",
          "<|tool_call_end|>", "<tool_call>", "</tool_call>", "<tool_sep>", "<arg_key>",
          "</arg_key>", "<arg_value>", "</arg_value>"]  # fmt: skip


def test_what_begins_a_call_is_what_each_parser_of_vllm_looks_for():
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager

    made = get_cached_tokenizer(tokenizer([*TURNS["deepseek_v31"][0], *NEEDED]))
    found = {}
    for name in sorted(ToolParserManager.lazy_parsers):
        found[name] = vllm_calls.begin_marks(ToolParserManager.get_tool_parser(name)(made, []))
    assert [name for name, marks in found.items() if not marks] == list(UNMARKED)
    for name, (_, written) in TURNS.items():
        assert any(mark in written for mark in found[name])
    assert not [name for name, marks in found.items() if any("end" in one for one in marks)]


def test_a_parser_that_cannot_be_used_is_said_at_the_start():
    with pytest.raises(ConfigError, match="vLLM has no parser 'kimi'; it has .*kimi_k2"):
        Form.named("vllm:kimi", tokenizer([]))
    with pytest.raises(ConfigError, match="calls=vllm:openai: .* cannot be used with this model"):
        Form.named("vllm:openai", tokenizer([]))
