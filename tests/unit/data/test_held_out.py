"""Held-out prompts: every row once, the same each time, with seeds of their own."""

from __future__ import annotations

import json

import pytest

from lora_moe_rl.config import EvalSetConfig
from lora_moe_rl.data.held_out import held_out_prompts, seed_of_prompt, seed_of_rows
from lora_moe_rl.data.rows import read_rows
from lora_moe_rl.errors import DataError
from lora_moe_rl.tiny.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def prompts(config: EvalSetConfig, tokenizer, name="eval/sums", seed=0):
    config = config.at("eval.sets.sums")
    rows = read_rows(config) if config.path is not None else None
    return held_out_prompts(name, config, tokenizer, seed, 32, rows).prompts


def test_every_row_of_a_file_is_asked_once_in_its_order(tmp_path, tokenizer):
    file = tmp_path / "sums.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": i}) + "\n" for i in range(9))
    )
    found = prompts(EvalSetConfig(path=str(file), limit=7), tokenizer)
    assert [(one.number, one.text) for one in found] == [(i, f"{i}+1=") for i in range(7)]
    assert {one.data_set for one in found} == {"eval/sums"} and found[3].columns["answer"] == 3


def test_rows_that_are_left_out_are_counted_and_the_others_keep_their_numbers(tmp_path, tokenizer):
    file = tmp_path / "sums.jsonl"
    lines = [{"prompt": "1+" * (i % 3 == 1) * 40 + "1=", "rate": float(i)} for i in range(7)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = EvalSetConfig(path=str(file), too_long="drop", filter={"rate": (1, 6)})
    config = config.at("eval.sets.sums")
    found = held_out_prompts("eval/sums", config, tokenizer, 0, 32, read_rows(config))
    assert [one.number for one in found.prompts] == [2, 3, 5, 6]
    assert [one.data_row for one in found.prompts] == [2, 3, 5, 6]
    assert (found.dropped, found.filtered) == (2, 1)


def test_a_generator_gives_the_same_rows_each_time_and_others_to_other_seeds(tokenizer):
    config = EvalSetConfig(generator=GENERATOR, limit=20)
    texts = [one.text for one in prompts(config, tokenizer)]
    assert len(texts) == 20 and texts == [one.text for one in prompts(config, tokenizer)]
    assert texts != [one.text for one in prompts(config, tokenizer, name="eval/other")]
    assert texts != [one.text for one in prompts(config, tokenizer, seed=1)]


GENERATOR = f"{__file__}:rows"


def rows(seed):
    import random

    draw = random.Random(seed)
    while True:
        yield {"prompt": f"{draw.randrange(100)}+{draw.randrange(100)}="}


def none(seed):
    yield from ()


def raises():
    yield {"prompt": "1+1="}
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "eval.sets.sums.generator={}: none of the 0 rows is left"),
        ("raises", "eval.sets.sums.generator={}, row 1: raised KeyError('gone')"),
    ],
)
def test_generators_without_rows(tokenizer, name, message):
    generator = f"{__file__}:{name}"
    with pytest.raises(DataError) as caught:
        prompts(EvalSetConfig(generator=generator, limit=3), tokenizer)
    assert message.format(generator) in str(caught.value)


def test_rows_that_are_all_left_out_are_an_error(tmp_path, tokenizer):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "1+" * 40 + "1="}) + "\n")
    with pytest.raises(DataError, match="none of the 1 rows is left to be asked: 0 are outside"):
        prompts(EvalSetConfig(path=str(file), too_long="drop"), tokenizer)


def test_a_prompt_without_room_is_told_of_by_the_sets_own_bound(tmp_path, tokenizer):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "1+" * 40 + "1="}) + "\n")
    config = EvalSetConfig(path=str(file), max_response_tokens=9)
    for too_long in ("drop", "error"):
        with pytest.raises(DataError, match="model.max_length - eval.sets.sums.max_response_token"):
            prompts(config.model_copy(update={"too_long": too_long}), tokenizer)


def test_seeds_are_of_seed_set_and_row_alone_and_never_those_of_training_data():
    seeds = {seed_of_prompt(s, name, row) for s in (0, 1) for name in ("a", "b") for row in (0, 1)}
    assert len(seeds) == 8
    assert seed_of_prompt(0, "a", 1) == 262495941  # in every version: figures stay comparable
    assert seed_of_rows(0, "a") != 0
