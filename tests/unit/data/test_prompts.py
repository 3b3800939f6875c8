"""Prompts: where they come from, their order, resuming, and bad input."""

import re

import pytest
from prompt_sources import MAX_TOKENS, TOKENIZER, source, texts

from lora_moe_rl.config import DataConfig
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.data.rows import is_hub, read_rows
from lora_moe_rl.errors import ConfigError, DataError
from lora_moe_rl.tiny.tokenizer import make_tokenizer


def test_a_row_becomes_a_prompt(write):
    path = write({"prompt": "1+2=", "answer": "3", "level": 5})
    (prompt,) = source(path=path).next(1)
    assert prompt.text == "1+2=" and prompt.token_ids == TOKENIZER.encode("1+2=")
    assert prompt.columns == {"answer": "3", "level": 5} and prompt.number == 0


def test_each_epoch_has_every_row_in_an_order_of_its_own(write):
    path = write(*({"prompt": str(i)} for i in range(20)))
    drawn = source(path=path)
    first, second = texts(drawn.next(20)), texts(drawn.next(20))
    assert sorted(first) == sorted(second) == sorted(map(str, range(20))) and first != second
    assert texts(source(path=path).next(20)) == first
    assert texts(source(path=path, seed=4).next(20)) != first
    assert [prompt.number for prompt in drawn.next(3)] == [40, 41, 42]


def test_a_prompt_knows_its_row_of_the_file_whenever_it_is_drawn(write):
    """With those that are left out: it is the number that an evaluation of the file tells."""
    path = write(*({"prompt": f"{i}" * (1 + 80 * (i == 2)), "level": i} for i in range(9)))
    drawn = source(path=path, too_long="drop", filter={"level": [1, None]})
    found = drawn.next(14)
    assert [prompt.number for prompt in found] == list(range(14))
    assert [str(prompt.data_row) for prompt in found] == texts(found)
    assert texts(found) != sorted(texts(found)) and {"0", "2"}.isdisjoint(texts(found))


def test_a_prompt_of_a_generator_has_the_number_of_its_row_in_the_pass(tmp_path):
    rows = "def rows():\n    yield from ({'prompt': str(i), 'level': i} for i in range(4))\n"
    (tmp_path / "few.py").write_text(rows)
    drawn = source(generator=f"{tmp_path}/few.py:rows", filter={"level": [1, None]})
    assert [prompt.data_row for prompt in drawn.next(5)] == [1, 2, 3, 1, 2]


def test_without_shuffle_and_with_a_limit(write):
    path = write(*({"prompt": str(i)} for i in range(20)))
    assert texts(source(path=path, order="sequential", limit=3).next(5)) == [
        "0",
        "1",
        "2",
        "0",
        "1",
    ]


def test_fewer_rows_than_a_step_takes_are_told_of(write):
    path = write(*({"prompt": str(i), "level": i} for i in range(8)))
    assert source(path=path).repeated(8) == []
    (told,) = source(path=path).repeated(9)
    assert f"data.path={path} has 8 prompts, and a step takes 9" in told
    (told,) = source(path=path, limit=5).repeated(8)
    assert "has 5 prompts (data.limit=5), and a step takes 8" in told
    (told,) = source(path=path, filter={"level": [2, None]}).repeated(8)
    assert "has 6 prompts" in told


@pytest.mark.parametrize("name", ["io.jsonl", "io.csv"])
def test_what_the_disk_refuses_is_named(tmp_path, name):
    (tmp_path / name).symlink_to("/proc/self/mem")  # which opens, and whose first byte is no file's
    with pytest.raises(DataError, match=f"{name} cannot be read: Input/output error"):
        source(path=str(tmp_path / name))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": "1+2="}],
            "reward_model": {"style": "rule", "ground_truth": "3"},
        }
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "verl.parquet")
    (prompt,) = source(path=str(tmp_path / "verl.parquet")).next(1)
    assert prompt.text == rows[0]["prompt"] and prompt.columns["answer"] == "3"
    assert TOKENIZER.decode(prompt.token_ids) == "user: 1+2=\nassistant: "


def test_the_chat_template_is_for_messages_and_for_strings_when_asked(write):
    message = [{"role": "user", "content": "hi"}]
    (prompt,) = source(path=write({"messages": message})).next(1)
    assert TOKENIZER.decode(prompt.token_ids) == "user: hi\nassistant: " and prompt.text == message
    (prompt,) = source(path=write({"question": "hi"}), chat_template=True).next(1)
    assert TOKENIZER.decode(prompt.token_ids) == "user: hi\nassistant: " and prompt.text == "hi"


def test_columns_can_be_named(write):
    path = write({"prompt": "a", "text": {"q": "b"}, "label": "x", "solution": "y"})
    (prompt,) = source(path=path, prompt_key="text.q", answer_key="label").next(1)
    assert prompt.text == "b" and prompt.columns["answer"] == "x"


GOOD = {"prompt": "a"}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "has no rows"),
        (["", "  "], "has no rows"),
        ([GOOD, '{"prompt": '], "line 2: not a line of JSON"),
        ([GOOD, "[1]"], r"line 2: a row must be an object, this is \[1\]"),
        ([GOOD, "", {"text": "a"}], "line 3: no prompt; .*prompt_key must .* its own: text"),
        ([GOOD, {"prompt": None}], "line 2: no prompt"),
        ([{"prompt": ""}], "line 1: the prompt .column prompt. is empty"),
        ([{"prompt": []}], "line 1: the prompt .column prompt. is empty"),
        ([{"prompt": 5}], "line 1: .* string or a list .* this is 5"),
        ([{"prompt": [{"role": "user"}]}], "line 1: .* objects with role"),
        ([GOOD, {"prompt": "x" * 25}], "line 2: the prompt has 25 tokens; at most 24 fit"),
        ([GOOD, '{"prompt": "1\\ud8002"}'], r"line 2: .*prompt. holds '.ud800', half of a surrog"),
        ([{"prompt": [{"role": "user", "content": "\udfff"}]}], "line 1: .*half of a surrogate"),
        ([GOOD, '{"prompt": ' + "[" * 100_000], "line 2: not a line of JSON"),
        ([{"prompt": "a", "question": "b"}], "prompt and question .* data.prompt_key=prompt"),
        ([{"prompt": "a", "label": 1, "answer": 2}], "answer and label .* data.answer_key=answer"),
    ],
)
def test_bad_rows(write, rows, reason):
    with pytest.raises(DataError, match=reason):
        source(path=write(*rows))


def test_a_prompt_must_have_tokens(write):
    class Deaf:
        """Some tokenizers drop what they do not know, and add no token of their own."""

        chat_template = bos_token_id = eos_token_id = bos_token = eos_token = None

        def encode(self, text):
            return []

    path = write({"prompt": "\u200b"})
    with pytest.raises(DataError, match=r"line 1: the model's tokenizer makes no tokens .*u200b"):
        PromptSource(DataConfig(path=path), Deaf(), 0, MAX_TOKENS)


def test_csv(tmp_path):
    (tmp_path / "data.csv").write_text(
        'question,answer,level\n"1+2=",3,a\n"say ""4,5""\nnow",4,b\n'
    )
    first, second = source(path=str(tmp_path / "data.csv"), order="sequential").next(2)
    assert first.text == "1+2=" and first.columns == {"answer": "3", "level": "a"}
    assert second.text == 'say "4,5"\nnow'
    (tmp_path / "short.csv").write_text("prompt,answer\na,b\nc\n")
    with pytest.raises(DataError, match=r"short.csv, line 3: it has not the 2 values"):
        source(path=str(tmp_path / "short.csv"))
    (tmp_path / "latin.csv").write_bytes("prompt\né\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.csv cannot be read as CSV in UTF-8"):
        source(path=str(tmp_path / "latin.csv"))


def test_a_data_set_that_was_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": str(i), "answer": i} for i in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert texts(source(path=str(tmp_path / "saved"), order="sequential").next(3)) == [
        "0",
        "1",
        "2",
    ]
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"not a directory of one split.*name one, .*splits/train"):
        source(path=str(tmp_path / "splits"))


def test_a_system_prompt_comes_before_a_prompt_that_has_none(write):
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}]
    path = write({"prompt": "a"}, {"prompt": own})
    settings = {"order": "sequential", "chat_template": True, "system_prompt": "S"}
    maker = PromptSource(DataConfig(path=path, **settings), TOKENIZER, 0, 100)
    rendered = [TOKENIZER.decode(prompt.token_ids) for prompt in maker.next(2)]
    assert rendered[0] == "system: S\nuser: a\nassistant: "
    assert rendered[1] == "system: mine\nuser: b\nassistant: "
    with pytest.raises(
        DataError, match="line 1: data.system_prompt is set, .* data.chat_template=true"
    ):
        source(path=path, system_prompt="S")


def test_the_chat_template_is_given_what_config_and_row_say(write):
    tokenizer = make_tokenizer()
    said = "{{ level }}{{ style }}{{ messages[0].content }}"
    tokenizer.chat_template = said + "{% if bad %}{{ raise_exception('no') }}{% endif %}"
    rows = [{"prompt": "a"}, {"prompt": "a", "chat_template_kwargs": {"level": 2}}]
    config = {"chat_template": True, "chat_template_kwargs": {"level": 1, "style": "x"}}
    config |= {"order": "sequential"}
    made = PromptSource(DataConfig(path=write(*rows), **config), tokenizer, 0, MAX_TOKENS)
    assert [tokenizer.decode(prompt.token_ids) for prompt in made.next(2)] == ["1xa", "2xa"]
    for bad, reason in [({"bad": 1}, "chat template refuses the prompt: no"), (3, "an object")]:
        path = write({"prompt": "a", "chat_template_kwargs": bad})
        with pytest.raises(DataError, match=reason):
            PromptSource(DataConfig(path=path, **config), tokenizer, 0, MAX_TOKENS)


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({}, {"chat_template_kwargs": {"a": 1}}, "line 2: data.chat_template_kwargs is set, and"),
        ({"chat_template_kwargs": {"a": 1}}, {}, "line 2: there is a column chat_template_kwargs,"),
    ],
)
def test_what_is_for_a_chat_template_that_is_not_applied_is_refused(write, row, settings, reason):
    messages = [{"role": "user", "content": "a"}]
    path = write({"prompt": messages, **row}, {"prompt": "a", **row})
    with pytest.raises(DataError, match=reason + ".*set data.chat_template=true"):
        source(path=path, **settings)
    assert source(path=path, chat_template=True, **settings).lengths() == [19, 19]


def test_a_prompt_that_is_too_long_may_be_left_out(write):
    path = write({"prompt": "a" * 25}, {"prompt": "b" * 24}, {"prompt": "c" * 30}, {"prompt": "d"})
    kept = source(path=path, too_long="drop", order="sequential")
    assert texts(kept.next(3)) == ["b" * 24, "d", "b" * 24]
    assert kept.dropped == 2 and kept.lengths() == [24, 1]
    with pytest.raises(DataError, match=r"none of the 2 rows is left: .* 2 have prompts of more "):
        source(path=write({"prompt": "a" * 25}, {"prompt": "b" * 26}), too_long="drop")


LEVELS = [3, 1, 2, 1, 3, 2, 1, 3]


@pytest.fixture
def levels(write):
    """Rows a to h of the levels LEVELS; the last has it as a text."""
    rows = [{"prompt": p, "level": n} for p, n in zip("abcdefgh", LEVELS, strict=True)]
    rows[-1]["level"] = "3.0"
    return write(*rows)


def test_rows_may_come_by_a_column(levels):
    up, down = source(path=levels, order="by:level"), source(path=levels, order="by:-level")
    first, second = texts(up.next(8)), texts(up.next(8))
    for epoch in (first, second, texts(down.next(8))[::-1]):
        assert [LEVELS["abcdefgh".index(text)] for text in epoch] == sorted(LEVELS)
    assert sorted(first) == sorted(second) and first != second
    assert texts(source(path=levels, order="sequential").next(9)) == list("abcdefgha")


def test_rows_outside_a_filter_are_left_out(levels):
    kept = source(path=levels, filter={"level": [2, None]}, order="sequential")
    assert texts(kept.next(6)) == list("acefha") and (kept.filtered, kept.dropped) == (3, 0)
    kept = source(path=levels, filter={"level": [2, 2]}, order="sequential", limit=5)
    assert texts(kept.next(2)) == ["c", "c"] and kept.filtered == 4
    with pytest.raises(DataError, match=r"none of the 8 rows is left: 8 are outside data.filter={"):
        source(path=levels, filter={"level": [None, 0.5]})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, r"line 2: no column 'level' \({}\); it has none"),
        ({"prompt": "a", "level": "hard"}, r"line 2: column level \({}\) is not a number: 'hard'"),
        ({"prompt": "a", "level": True}, r"line 2: column level \({}\) is not a number: True"),
        ({"prompt": "a", "level": "nan"}, r"line 2: column level \({}\) is not a number: 'nan'"),
        ({"prompt": "a", "level": {"a": 1}}, r"line 2: column level \({}\) is not a number"),
    ],
)
def test_columns_that_filter_or_order_must_be_numbers(write, row, reason):
    path = write({"prompt": "a", "level": 1}, row)
    for key, setting in (("order", "by:level"), ("filter", {"level": [0, 1]})):
        with pytest.raises(DataError, match=reason.format(f"data.{key}")):
            source(path=path, **{key: setting})


def test_a_look_at_the_next_prompts_takes_none(write, generators):
    path = write(*({"prompt": str(i)} for i in range(7)))
    for config in ({"path": path}, {"generator": f"{generators}:counting"}):
        drawn = source(**config)
        drawn.next(2)
        seen = drawn.peek(8)
        assert drawn.next(8) == seen


def test_a_named_column_must_be_there(write):
    path = write({"prompt": "a"})
    with pytest.raises(DataError, match=r"no column 'text' \(data.prompt_key\); it has prompt"):
        source(path=path, prompt_key="text")
    with pytest.raises(DataError, match=r"no column 'gold' \(data.answer_key\)"):
        source(path=path, answer_key="gold")


def test_bad_files(tmp_path):
    for name, reason in [("absent.jsonl", "no such file"), ("data.txt", "is not a .jsonl")]:
        (tmp_path / "data.txt").write_text("prompt\na\n")
        with pytest.raises(DataError, match=reason):
            source(path=str(tmp_path / name))
    (tmp_path / "shards").mkdir()
    with pytest.raises(DataError, match=r"\(it has no state.json\)$"):
        source(path=str(tmp_path / "shards"))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "shards" / name).write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match=r"holds a.jsonl, ...: name one file.*save_to_disk\(DIR\)"):
        source(path=str(tmp_path / "shards"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        source(path=str(tmp_path / "broken.parquet"))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match="line 1: not a line of JSON"):
        source(path=str(tmp_path / "latin.jsonl"))


@pytest.mark.parametrize(
    "path", ["[a.jsonl,b.jsonl]", "a.jsonl,b.jsonl", "rows/train.json", "a/b/c", "my rows", "a.gz"]
)
def test_what_is_no_file_and_can_be_no_name_of_the_hub_is_not_asked_for_there(path):
    assert not is_hub(path)
    with pytest.raises(DataError) as error:
        source(path=path)
    told = str(error.value)
    assert "there is no such file" in told and ("data.sets.NAME.path" in told) == ("," in path)


@pytest.mark.parametrize("name", ["gsm8k", "openai/gsm8k", "BytedTsinghua-SIA/DAPO-Math-17k"])
def test_names_of_the_hub(name):
    assert is_hub(name)


def test_data_must_come_from_one_place(write):
    with pytest.raises(ConfigError, match="there is no data"):
        source()
    with pytest.raises(ConfigError, match=r"data.path and data.generator are both set"):
        source(path=write(GOOD), generator="a:b")


class WithEnds:
    """A tokenizer that puts a token before every text, and one behind it."""

    chat_template, bos_token, eos_token, bos_token_id, eos_token_id = None, "<s>", "</s>", 1, 2

    def encode(self, text):
        ends = {"<s>": 1, "</s>": 2}
        words = [word for word in re.split(r"(</?s>)", text) if word]
        return [1, *(ends.get(word, 9) for word in words), 2]


def test_a_prompt_does_not_begin_twice_and_does_not_end(write):
    source = PromptSource(DataConfig(path=write({"prompt": "hi"})), WithEnds(), 0, MAX_TOKENS)
    assert source.next(1)[0].token_ids == [1, 9]
    with pytest.raises(DataError, match="begins with '<s>' twice.*leave it out of the prompt"):
        PromptSource(DataConfig(path=write({"prompt": "<s>hi"})), WithEnds(), 0, MAX_TOKENS)


def test_a_column_that_is_named_twice_is_refused(tmp_path, write):
    (tmp_path / "twice.csv").write_text("prompt,answer,answer\n1,2,3\n")
    with pytest.raises(DataError, match="twice.csv, line 1: it names answer twice"):
        read_rows(DataConfig(path=str(tmp_path / "twice.csv")))
    with pytest.raises(
        DataError, match="line 1: not a line of JSON: the key 'answer' stands twice"
    ):
        read_rows(DataConfig(path=write('{"prompt": "1", "answer": "2", "answer": "3"}')))


def test_a_token_that_the_model_lacks_is_named_with_its_row(write):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    config = DataConfig(path=write({"prompt": "1+1="}, {"prompt": "<think>1+1="}))
    for size in (None, 257, 512):  # of an embedding that is padded
        tokenizer.model_vocab_size = size
        assert len(PromptSource(config, tokenizer, 0, MAX_TOKENS).next(2)) == 2
    tokenizer.model_vocab_size = 256
    told = r"line 2: the prompt has the token '<think>' of the id 256, and the model .* below 256"
    with pytest.raises(DataError, match=f"{told}.*resize_token_embeddings"):
        PromptSource(config, tokenizer, 0, MAX_TOKENS)
