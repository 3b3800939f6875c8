"""Lists of messages as data sets have them: contents in parts, roles of other tools, answers at the
end; and templates that pass over what they do not know."""

import json

import pytest
from prompt_sources import TOKENIZER, source

from lora_moe_rl.config import DataConfig
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.errors import DataError
from lora_moe_rl.tiny.tokenizer import make_tokenizer

# As Qwen3's: what is no text is empty, and a role that it does not know is passed over.
PASSES_OVER = """
{%- for message in messages -%}
{%- if message.content is string -%}{%- set content = message.content -%}
{%- else -%}{%- set content = "" -%}{%- endif -%}
{%- if message.role == "user" or message.role == "system" -%}
{{ message.role + ": " + content + "\n" }}
{%- elif message.role == "assistant" -%}
{{ "assistant: " + content.split("</think>")[-1] + "\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "assistant: " }}{%- endif -%}
"""


def message(role, content):
    return {"role": role, "content": content}


def part(text):
    return {"type": "text", "text": text}


def passing_over(path, **config):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PASSES_OVER
    return PromptSource(DataConfig(path=path, **config), tokenizer, 0, 512)


def test_contents_in_parts_are_texts(write):
    path = write({"messages": [message("user", [part("1+"), part("2=")])]})
    for found in (source(path=path), passing_over(path)):
        (prompt,) = found.next(1)
        assert TOKENIZER.decode(prompt.token_ids) == "user: 1+2=\nassistant: "
        assert prompt.text == [message("user", "1+2=")]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([{"type": "image", "image": "x.png"}, part("1+2=")], "'type': 'image'"),
        ([{"type": "text"}], "'type': 'text'"),
        (["1+2="], "'1.2='"),
        (5, "5"),
        ({"text": "1+2="}, "'text': '1.2='"),
    ],
)
def test_contents_that_are_no_text_are_refused(write, content, shown):
    path = write({"messages": [message("user", content)]})
    with pytest.raises(DataError, match=rf"line 1: a message of column messages has .*{shown}"):
        source(path=path)


def test_a_prompt_that_ends_with_an_answer_is_refused(write):
    path = write({"messages": [message("user", "1+2="), message("assistant", "3")]})
    with pytest.raises(DataError, match=r"line 1: the last message .* is the assistant's, '3'"):
        source(path=path)


@pytest.mark.parametrize("spell", [json.dumps, repr])
def test_messages_that_are_written_as_a_text_are_refused(write, spell):
    path = write({"prompt": spell([message("user", "1+2=")])})
    with pytest.raises(DataError, match="line 1: .* is a text that spells a list of messages"):
        source(path=path)


def test_what_the_template_passes_over_is_an_error(write):
    path = write({"messages": [message("human", "1+2=")]})
    with pytest.raises(DataError, match=r"line 1: .*template leaves out what 'human' says, '1.2='"):
        passing_over(path)
    path = write({"messages": [message("developer", "briefly"), message("user", "1+2=")]})
    with pytest.raises(DataError, match="leaves out what 'developer' says"):
        passing_over(path)


def test_a_template_may_write_space_and_the_assistants_turns_otherwise(write):
    before = [message("user", " 1+2=\n"), message("assistant", "<think>hm</think>3")]
    (prompt,) = passing_over(write({"messages": [*before, message("user", "twice")]})).next(1)
    said = "user:  1+2=\n\nassistant: 3\nuser: twice\nassistant: "
    assert TOKENIZER.decode(prompt.token_ids) == said


def test_a_turn_that_is_calls_of_tools_alone_says_nothing(write):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    called = message("assistant", None) | {"tool_calls": [call]}
    path = write({"messages": [message("user", "1+2="), called, message("user", "go on")]})
    (prompt,) = passing_over(path).next(1)
    said = "user: 1+2=\nassistant: \nuser: go on\nassistant: "
    assert TOKENIZER.decode(prompt.token_ids) == said


def test_a_short_text_that_stands_there_by_chance_is_missed_all_the_same(write):
    """As every digit does in a sum."""
    path = write({"messages": [message("human", "1"), message("user", "1+2=")]})
    with pytest.raises(DataError, match="leaves out what 'human' says, '1'"):
        passing_over(path)


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("message.content | upper", "HOW MANY LEGS HAVE TWO CATS?"),
        ("message.content | replace(' ', '_')", "How_many_legs_have_two_cats?"),
        ("message.content[:8]", "How many"),
        ("'Q: ' + (message.content | trim | lower)", "Q: how many legs have two cats?"),
    ],
)
def test_a_template_may_write_a_text_otherwise(write, content, written):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role in ('system', 'user') %}"
        + "{{ "
        + content
        + " }}{% endif %}{% endfor %}"
    )
    path = write({"messages": [message("user", "How many legs have two cats?")]})
    (prompt,) = PromptSource(DataConfig(path=path), tokenizer, 0, 512).next(1)
    assert tokenizer.decode(prompt.token_ids) == written
    path = write({"messages": [message("human", "How many legs have two cats?")]})
    with pytest.raises(DataError, match="leaves out what 'human' says"):
        PromptSource(DataConfig(path=path), tokenizer, 0, 512)


def test_a_template_that_refuses_a_changed_text_has_looked_at_it(write):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.content | length > 9 %}"
        "{{ raise_exception('no sum') }}{% endif %}a sum{% endfor %}"
    )
    path = write({"messages": [message("user", "1+2=")]})
    (prompt,) = PromptSource(DataConfig(path=path), tokenizer, 0, 512).next(1)
    assert tokenizer.decode(prompt.token_ids) == "a sum"
