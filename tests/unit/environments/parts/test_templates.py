"""What stands between two turns, in chat templates that know tools and in those that do not."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import DataConfig
from lora_moe_rl.data.maker import PromptMaker
from lora_moe_rl.environments.parts import templates
from lora_moe_rl.environments.parts.templates import Between, Introduced
from lora_moe_rl.environments.parts.tool_calls import Form
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.tokenizer import foreign_ids
from lora_moe_rl.tiny.tokenizer import make_tokenizer, token_id

pytestmark = pytest.mark.seconds  # imports transformers
SCHEMAS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
EOS = token_id("<eos>")
# In the manner of Qwen's: an end-of-turn token, tools in the system prompt.
CHATML = (
    "{% if tools %}[{{ tools[0]['function']['name'] }}]{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tokenizer(template: str | None = CHATML):
    made = make_tokenizer()
    made.chat_template = template
    return made


def told(*contents: str, **about: str) -> list[dict[str, str]]:
    return [{"role": "tool", "content": content} | about for content in contents]


def test_between_turns_stands_what_the_template_writes_there_and_its_end_token_only_once():
    made = tokenizer()
    token_ids = Between(made, "tool", "\n{answer}\n").in_chat(EOS, told("17", "18"), {})
    assert made.decode(token_ids) == "\n<s>tool\n17<eos>\n<s>tool\n18<eos>\n<s>assistant\n"
    other = Between(made, "tool", "\n{answer}\n").in_chat(ord("x"), told("17"), {})
    assert made.decode(other) == "<eos>\n<s>tool\n17<eos>\n<s>assistant\n"


def test_all_turns_together_are_what_the_template_writes_of_the_whole():
    made = tokenizer()
    asked = [{"role": "user", "content": "add"}]
    said = [{"role": "assistant", "content": "[f()]"}, {"role": "tool", "content": "3"}]

    def render(messages):
        return made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    together = (
        render(asked)
        + "[f()]<eos>"
        + made.decode(Between(made, "tool", "\n{answer}\n").in_chat(EOS, told("3"), {}))
    )
    assert together == render([*asked, *said])


# In the manner of MiniMax-M2's and GPT-OSS's: an answer to a call alone, under the call's name.
OF_CALLS = (
    "{% set last = namespace(name=none) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}{% endif %}"
    "<s>functions.{{ last.name }}\n{{ m.content }}<eos>\n"
    "{% else %}<s>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "!{{ c.function.name }}{% set last.name = c.function.name %}{% endfor %}<eos>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def test_a_template_that_wants_the_call_before_an_answer_is_shown_one():
    made = tokenizer(OF_CALLS)
    between = Between(made, "tool", "\n{answer}\n")
    after = "<s>functions.add\n17<eos>\n<s>functions.add\n18<eos>\n<s>assistant\n"
    assert made.decode(between.in_chat(EOS, told("17", "18", name="add"), {})) == "\n" + after
    assert made.decode(between.in_chat(ord("x"), told("17", "18", name="add"), {})) == after
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    whole = made.apply_chat_template(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "I add.", "tool_calls": [call]},
            {"role": "tool", "content": "17"},
            {"role": "tool", "content": "18"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert whole.endswith("I add.!add<eos>\n" + after)


# In the manner of Kimi-K2's: an answer under the id that the model gave its call.
BY_ID = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{{ m.content }}{% if m.name %}!{{ m.name }}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def test_a_template_is_told_the_name_and_id_of_the_call_that_an_answer_is_to():
    made = tokenizer(BY_ID)
    answers = told("17", name="add", tool_call_id="functions.add:0")
    between = Between(made, "tool", "\n{answer}\n")
    expected = "\n<s>tool\n## Return of functions.add:0\n17!add<eos>\n<s>assistant\n"
    assert made.decode(between.in_chat(EOS, answers, {})) == expected
    as_user = Between(made, "user", "\n{answer}\n")  # who has neither
    assert made.decode(as_user.in_chat(EOS, answers, {})) == "\n<s>user\n17<eos>\n<s>assistant\n"


def test_in_plain_text_answers_stand_in_lines_of_their_own():
    made = tokenizer(None)
    assert made.decode(Between(made, "tool", "\n{answer}\n").in_text(["17", "18"])) == "\n17\n18\n"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}", "refuses"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "does not show"),
        ("nothing", "does not show"),
    ],
)
def test_a_template_that_knows_no_tools_answers_is_refused_at_the_start(template, told):
    with pytest.raises(ConfigError, match=f"{told}.*(\n.*)*environment.answer_role"):
        Between(tokenizer(template), "tool", "\n{answer}\n")


def test_tools_are_told_of_by_the_template_or_else_by_the_system_prompt():
    asked = [{"role": "user", "content": "hi"}]
    knows = Introduced(tokenizer(), SCHEMAS, Form.named("json"))
    assert knows.in_template
    assert knows.apply_chat_template(asked, tokenize=False).startswith("[add]<s>user\nhi")
    plain = make_tokenizer()  # the tiny models' template has no tools
    told = Introduced(plain, SCHEMAS, Form.named("python"))
    text = told.apply_chat_template(asked, tokenize=False)
    assert not told.in_template and text.startswith('system: You can call these tools:\n{"name"')
    text = told.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, *asked], tokenize=False
    )
    assert text.startswith("system: Be brief.\n\nYou can call") and text.count("system:") == 1
    with pytest.raises(ConfigError, match="chat_template_kwargs has tools"):
        knows.apply_chat_template(asked, tools=[])


def test_how_an_answer_stands_in_plain_text_must_have_the_answer():
    with pytest.raises(ConfigError, match=r"environment.answer_in_text='x' has no \{answer\}"):
        Between(tokenizer(None), "tool", "x")


def test_beside_its_chat_template_it_is_the_tokenizer():
    plain = make_tokenizer()
    plain.model_vocab_size = 256
    told = Introduced(plain, SCHEMAS, Form.named("json"))
    assert told.encode("1+2") == plain.encode("1+2") and told.eos_token_id == plain.eos_token_id
    assert foreign_ids(told, [256]) == [256]
    assert PromptMaker(DataConfig(), told, 9).make(("row", {"prompt": "1+2"})).token_ids == [
        *b"1+2"
    ]


def test_what_stands_for_a_turn_is_in_no_answer_and_never_the_same(monkeypatch):
    """An answer that holds it would take the header of its role with it, and the turn's end."""
    made, marks = tokenizer(), iter(["0f5c9e1d7a", "ab", "cd", "ef"])
    between = Between(made, "tool", "\n{answer}\n")
    monkeypatch.setattr(templates, "token_hex", lambda n: next(marks))
    for answers in (["log 0f5c9e1d7a end", "ab"], ["cd"]):
        after = made.decode(between.in_chat(ord("x"), told(*answers), {}))
        shown = "".join(f"<s>tool\n{answer}<eos>\n" for answer in answers)
        assert after == f"<eos>\n{shown}<s>assistant\n"
    assert next(marks, None) is None
    monkeypatch.undo()
    assert templates.unsaid([]) != templates.unsaid([])
