"""Rows with answers: TRL's columns, what of them is trained, and bad input."""

from __future__ import annotations

import json

import pytest

from lora_moe_rl.config import DataConfig
from lora_moe_rl.data.maker import PromptMaker, Wanted
from lora_moe_rl.data.mixture import open_prompts
from lora_moe_rl.errors import DataError
from lora_moe_rl.tiny.tokenizer import make_tokenizer

EOS = 254
USER, SAID, WORSE = (
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "assistant", "content": "3"},
)
# Ends a turn with its end-of-sequence token and a line feed, as Qwen's does.
ENDING = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# Puts something before an answer that it does not put behind a prompt.
OTHERWISE = ENDING.replace(
    "{{ message['content'] }}", "{{ messages|length }}{{ message['content'] }}"
)


def made(row, kind="answers", template=None, max_tokens=64, ends=(EOS,), **config):
    tokenizer = make_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    maker = PromptMaker(DataConfig(**config), tokenizer, max_tokens, Wanted(kind, frozenset(ends)))
    found = maker.make(("rows.jsonl, line 1", row))
    return maker if found is None else found


def texts(found) -> tuple[str, ...]:
    decode = make_tokenizer().decode
    return decode(found.token_ids), *(decode(answer.token_ids) for answer in found.answers)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1+1=", "completion": "2"}, ("1+1=", "2<eos>")),
        ({"prompt": "1+1=", "completion": "2<eos>"}, ("1+1=", "2<eos>")),
        ({"question": "1+1=", "completion": " 2 \n"}, ("1+1=", " 2 \n<eos>")),
        ({"messages": [USER, SAID]}, ("user: 1+1=\nassistant: ", "2<eos>")),
        ({"prompt": [USER], "completion": [SAID]}, ("user: 1+1=\nassistant: ", "2<eos>")),
        ({"prompt": [USER], "completion": "2"}, ("user: 1+1=\nassistant: ", "2<eos>")),
    ],
)
@pytest.mark.parametrize("template", [None, ENDING])
def test_the_answer_is_what_stands_behind_the_prompt_of_a_rollout(row, expected, template):
    """Up to the token that ends it, whether or not the chat template writes one."""
    found = made(row, template=template)
    if template is ENDING:
        expected = (expected[0].replace("=\n", "=<eos>\n"), expected[1])
    assert texts(found) == expected and found.answers[0].token_ids[-1] == EOS
    rollout = PromptMaker(DataConfig(), make_tokenizer(), 64)
    rollout._tokenizer.chat_template = template or rollout._tokenizer.chat_template
    prompt = row.get("prompt", row.get("question")) or row["messages"][:-1]
    assert found.token_ids == rollout.make(("", {"prompt": prompt})).token_ids


def test_only_the_last_message_is_the_answer():
    row = {"messages": [USER, SAID, {"role": "user", "content": "2+2="}, WORSE]}
    prompt, answer = texts(made(row))
    assert prompt == "user: 1+1=\nassistant: 2\nuser: 2+2=\nassistant: " and answer == "3<eos>"


def test_strings_get_the_template_and_the_system_prompt_when_that_is_set():
    row = {"prompt": "1+1=", "completion": "2", "chat_template_kwargs": {"x": 1}, "level": 3}
    found = made(row, chat_template=True, system_prompt="Add.")
    assert texts(found) == ("system: Add.\nuser: 1+1=\nassistant: ", "2<eos>")
    assert found.columns == {"chat_template_kwargs": {"x": 1}, "level": 3}


def test_the_answers_column_may_have_another_name():
    row = {"prompt": "1+1=", "answer": "2", "reward_model": {"ground_truth": "two"}}
    assert texts(made(row, answer_key="answer"))[1] == "2<eos>"
    assert texts(made(row, answer_key="reward_model.ground_truth"))[1] == "two<eos>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [SAID], "rejected": [WORSE]},
        {"prompt": [USER], "chosen": "2", "rejected": "3"},
        {"chosen": [USER, SAID], "rejected": [USER, WORSE]},
        {"prompt": "1+1=", "chosen": [USER, SAID], "rejected": [USER, WORSE]},
    ],
)
def test_a_pair_is_its_chosen_and_its_rejected_answer(row):
    assert texts(made(row, "pairs")) == ("user: 1+1=\nassistant: ", "2<eos>", "3<eos>")


def test_a_pair_may_be_of_strings():
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    assert texts(made(row, "pairs")) == ("1+1=", "2<eos>", "3<eos>")


def test_an_engine_may_stop_at_another_token_than_the_tokenizers_own():
    assert made({"prompt": "1", "completion": "2"}, ends=(7,)).answers[0].token_ids == [50, 7]
    assert made({"prompt": "1", "completion": "2"}, ends=(7, EOS)).answers[0].token_ids[-1] == EOS


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        (
            {"prompt": "1"},
            "answers",
            "no answer to learn from; .*data.answer_key must name one of its own: prompt",
        ),
        ({"completion": "1"}, "answers", "no prompt; beside completion .*; it has completion"),
        ({"prompt": "", "completion": "1"}, "answers", "the prompt is empty"),
        (
            {"prompt": "1", "completion": " \n"},
            "answers",
            "the answer .column completion. is empty",
        ),
        ({"prompt": "1", "completion": 5}, "answers", "column completion. must be a string or a"),
        ({"messages": [USER]}, "answers", "must be the assistant's; it is of user"),
        ({"messages": [SAID]}, "answers", "has an answer alone"),
        ({"messages": []}, "answers", "it is of nobody"),
        (
            {"messages": [USER, SAID | {"tool_calls": []}]},
            "answers",
            "last message of column messages has tool_calls beside its content",
        ),
        (
            {"messages": [USER, SAID | {"content": None}]},
            "answers",
            "the content of the last message of column messages is None",
        ),
        (
            {"prompt": "1", "chosen": "2"},
            "pairs",
            "no column 'rejected', .*; it has prompt, chosen",
        ),
        ({"chosen": "1", "rejected": "2"}, "pairs", "no prompt; beside chosen and rejected"),
        (
            {"chosen": [USER, SAID], "rejected": [SAID, WORSE]},
            "pairs",
            "conversations of chosen and rejected differ before their last message",
        ),
        (
            {"prompt": "2+2=", "chosen": [USER, SAID], "rejected": [USER, WORSE]},
            "pairs",
            "column chosen begins with other messages than the prompt",
        ),
        ("a line", "answers", "a row must be an object"),
    ],
)
def test_a_row_without_an_answer_is_an_error_that_says_what_it_has(row, kind, message):
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: .*{message}"):
        made(row, kind)


def test_a_template_that_no_rollout_could_follow_is_an_error():
    with pytest.raises(DataError, match="renders the conversation with its answer otherwise"):
        made({"messages": [USER, SAID]}, template=OTHERWISE)


def test_a_model_without_an_end_of_sequence_is_an_error():
    with pytest.raises(DataError, match="names no token that ends a response"):
        made({"prompt": "1", "completion": "2"}, ends=())


def test_an_answer_counts_towards_the_longest_row():
    row = {"prompt": "1+1=", "completion": "2" * 10}  # 15 tokens with its end
    assert made(row, max_tokens=15).tokens == 15
    with pytest.raises(DataError, match="the prompt-and-answer has 15 tokens; at most 14 fit"):
        made(row, max_tokens=14)
    maker = made(row, max_tokens=14, too_long="drop")
    assert maker.dropped == 1
    assert "1 have prompt-and-answers of more than 14 tokens (model.max_length;" in (
        maker.why_left_out()
    )
    pair = {"prompt": "1", "chosen": "2", "rejected": "3" * 8}
    assert made(pair, "pairs").tokens == 10


def test_answers_come_with_the_prompts_of_a_source(tmp_path):
    rows = [{"prompt": f"{i}=", "completion": str(i) * (i + 1)} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(tmp_path / "rows.jsonl"), order="sequential")
    wanted = Wanted("answers", frozenset({EOS}))
    source = open_prompts(config, make_tokenizer(), 0, 20, {}, wanted)
    assert source.lengths() == [4, 5, 6]
    (prompt,) = source.next(1)
    assert prompt.answers[0].text == "0" and prompt.answers[0].token_ids == [48, EOS]


# Cuts off what stands before the end of the thoughts, as DeepSeek-R1's does.
FORGETFUL = ENDING.replace(
    "{{ message['content'] }}", "{{ message['content'].split('</think>')[-1] }}"
)
REFLOWED = ENDING.replace("{{ message['content'] }}", "{{ message['content'].split()|join(' ') }}")
THOUGHT = {"role": "assistant", "content": "<think>\n1+1\nis\n</think>\n\n2"}


def test_thoughts_that_a_template_cuts_off_are_not_learned_silently():
    with pytest.raises(DataError, match="leaves out of the answer .*1.1.*model.chat_template_file"):
        made({"messages": [USER, THOUGHT]}, template=FORGETFUL)
    with pytest.raises(DataError, match="leaves out of the answer"):
        made(
            {"prompt": [USER], "chosen": [THOUGHT], "rejected": [SAID]},
            "pairs",
            template=FORGETFUL,
        )
    assert texts(made({"messages": [USER, SAID]}, template=FORGETFUL))[1] == "2<eos>"
    shown = texts(made({"messages": [USER, THOUGHT]}, template=REFLOWED))[1]
    assert shown == "<think> 1+1 is </think> 2<eos>"  # other white space is the template's matter


def test_a_pair_of_one_answer_is_refused():
    with pytest.raises(DataError, match="both answers of the pair are the same tokens"):
        made({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "pairs")


WITH_TOOLS = "{% if tools %}{% for t in tools %}{{ t['name'] }};{% endfor %}{% endif %}" + ENDING
TOOLS = [{"name": "add"}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_of_a_row_are_given_to_the_chat_template(tools):
    row = {"messages": [USER, SAID], "tools": tools}
    assert texts(made(row, template=WITH_TOOLS))[0].startswith("add;user: ")
    with pytest.raises(DataError, match="has no place for the tools of column tools"):
        made(row, template=ENDING)
    with pytest.raises(DataError, match="column tools, and the prompt is a string without"):
        made({"prompt": "1+1=", "completion": "2", "tools": tools})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "1+1=", "completion": [SAID]},
            "the prompt is a string, which gets no chat template, and the answer .column completion"
            ". a message; set data.chat_template=true",
        ),
        (
            {"prompt": [USER, SAID], "completion": [WORSE]},
            "the last message of the prompt .column prompt. is the assistant's",
        ),
        (
            {"prompt": "1+1=", "completion": '[{"role": "assistant", "content": "2"}]'},
            "the answer .column completion. is a text that spells a list of messages",
        ),
        (
            {"prompt": "[{'role': 'user', 'content': '1+1='}]", "completion": "2"},
            "the prompt .column prompt. is a text that spells a list",
        ),
        (
            {"messages": [USER, SAID], "tools": "add"},
            "column tools must be a list of tools, as JSON schemas",
        ),
        (
            {"messages": [USER, SAID], "images": ["a.png"]},
            "column images is not given to the model",
        ),
    ],
)
def test_rows_that_would_be_learned_as_something_else_are_refused(row, said):
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: {said}"):
        made(row)


def test_keys_that_other_rows_of_a_parquet_file_have_are_none_of_this_row():
    nothing = {"tool_calls": None, "name": None}
    row = {"messages": [USER | nothing, SAID | nothing]}
    assert texts(made(row)) == texts(made({"messages": [USER, SAID]}))
    template = "{% if thinking %}T{% endif %}" + ENDING
    row = {"messages": [USER, SAID], "chat_template_kwargs": {"thinking": None, "style": "x"}}
    config = {"chat_template_kwargs": {"thinking": True}}
    assert texts(made(row, template=template, **config))[0].startswith("Tuser")


def sentence_piece():
    """A tokenizer of single characters that gives a text by itself a space in front, as that of
    Mixtral does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "<s>", "</s>", "▁", *"0123456789+=()xy\n"]
    bpe = models.BPE({c: i for i, c in enumerate(letters)}, [], unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in letters[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize(
    ("prompt", "answer"), [("23+58=", "81"), ("x=(", "y)"), ("x=", " 81"), ("x", "\n8")]
)
def test_an_answer_has_no_space_in_front_that_the_row_has_not(prompt, answer):
    tokenizer = sentence_piece()
    maker = PromptMaker(DataConfig(), tokenizer, 64, Wanted("answers", frozenset({2})))
    found = maker.make(("row", {"prompt": prompt, "completion": answer}))
    assert found is not None
    ids = found.answers[0].token_ids
    assert tokenizer.decode(found.token_ids + ids) == f"{prompt}{answer}</s>"
    assert len(ids) == len(answer) + 1


@pytest.mark.parametrize(
    "row", [{"completion": "<think>2"}, {"chosen": "2", "rejected": "<think>"}]
)
def test_a_token_of_an_answer_that_the_model_lacks_is_named(row):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.model_vocab_size = 256
    wanted = Wanted("pairs" if "chosen" in row else "answers", frozenset({EOS}))
    maker = PromptMaker(DataConfig(), tokenizer, 64, wanted)
    with pytest.raises(DataError, match="row 7: the answer has the token '<think>' of the id 256"):
        maker.make(("row 7", {"prompt": "1+1=", **row}))
