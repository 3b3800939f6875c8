"""Choosing among the samples of samples.jsonl."""

import json

import pytest
from recorded_run import PLANTED, config_in, record

from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.page.samples import ORDERS, Choice, Samples


@pytest.fixture
def run_dir(tmp_path):
    return record(tmp_path / "run")


def numbers(samples: Samples, choice: Choice, offset: int = 0, limit: int = 100) -> list[int]:
    return [one["number"] for one in samples.choose(choice, offset, limit)["list"]]


@pytest.mark.parametrize(
    ("choice", "holds"),
    [
        (Choice(step_from=2, step_to=3), lambda one: 2 <= one["step"] <= 3),
        (Choice(drawn=5), lambda one: one["drawn"] == 5),
        (Choice(reward_from=0.25, reward_to=0.5), lambda one: 0.25 <= one["reward"] <= 0.5),
        (Choice(finish="length"), lambda one: one["finish_reason"] == "length"),
        (Choice(finish="never"), lambda one: False),
        (Choice(text="RESPONSE 4-1"), lambda one: one["response"].startswith("response 4-1")),
        (Choice(text="what is 1 + 3"), lambda one: "1 + 3?" in one["prompt"]),
        (Choice(text="tool says"), lambda one: "messages" in one),
        (Choice(text="content"), lambda one: False),  # a key, and no text
        (Choice(text="window", step_from=6), lambda one: one["step"] == 6 and "messages" in one),
    ],
)
def test_a_filter_finds_the_samples_that_a_reader_of_the_file_finds(run_dir, choice, holds):
    wanted = [i for i, one in enumerate(read_jsonl(run_dir.samples_file)) if holds(one)]
    found = Samples(run_dir.samples_file).choose(choice, 0, 100)
    assert sorted(one["number"] for one in found["list"]) == wanted
    assert (found["chosen"], found["samples"]) == (len(wanted), 48)


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_that_of_its_numbers(run_dir, order):
    records = list(read_jsonl(run_dir.samples_file))
    found = numbers(Samples(run_dir.samples_file), Choice(order=order))
    key = {"newest": "step", "oldest": "step"}.get(order, order.removeprefix("-"))
    falling = order.startswith("-") or order == "newest"
    keys = [records[number][key] for number in found]
    assert keys == sorted(keys, reverse=falling) and sorted(found) == list(range(48))


def test_pages_follow_each_other(run_dir):
    samples = Samples(run_dir.samples_file)
    whole = numbers(samples, Choice())
    assert numbers(samples, Choice(), 0, 20) + numbers(samples, Choice(), 20, 50) == whole


def test_of_an_earlier_version_the_prompts_number_stood_under_row(tmp_path):
    path = tmp_path / "samples.jsonl"
    records = [{"step": 1, "row": 7}, {"step": 2, "drawn": 7, "row": 3}, {"step": 3, "row": 3}]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    samples = Samples(path)
    assert numbers(samples, Choice(drawn=7, order="oldest")) == [0, 1]
    assert samples.record(0) == {"number": 0, "step": 1, "drawn": 7}
    assert samples.record(1) == {"number": 1, "step": 2, "drawn": 7, "row": 3}


def test_a_sample_without_a_reward_comes_last_and_in_no_range(tmp_path):
    path = tmp_path / "samples.jsonl"
    rewards = [0.5, None, 0.1]
    path.write_text("".join(json.dumps({"step": 1, "reward": one}) + "\n" for one in rewards))
    samples = Samples(path)
    assert numbers(samples, Choice(order="reward")) == [2, 0, 1]
    assert numbers(samples, Choice(order="-reward")) == [0, 2, 1]
    assert numbers(samples, Choice(reward_to=1.0, order="oldest")) == [0, 2]


def test_a_text_is_found_in_one_sample_and_not_across_two(tmp_path):
    path = tmp_path / "samples.jsonl"
    responses = ["Straße ab", "cd", "ab ab\u2028x"]
    lines = [
        json.dumps({"step": 1, "response": one}, ensure_ascii=False) + "\n" for one in responses
    ]
    path.write_text("".join(lines))
    samples = Samples(path)
    assert numbers(samples, Choice(text="AB", order="oldest")) == [0, 2]
    assert numbers(samples, Choice(text="straße")) == [0]
    assert numbers(samples, Choice(text="ab\0cd")) == []
    assert samples.record(2) == {"number": 2, "step": 1, "response": responses[2]}


def test_what_a_run_adds_is_found_and_what_it_takes_back_is_gone(run_dir):
    samples = Samples(run_dir.samples_file)
    assert samples.choose(Choice(), 0, 1)["samples"] == 48
    record(run_dir.path, range(7, 8), True)
    assert samples.choose(Choice(step_from=7), 0, 1)["chosen"] == 8
    with RunDir(config_in(run_dir.path), resume=True) as again:
        again.rewind(1)
    found = samples.choose(Choice(text="window"), 0, 10)
    assert (found["samples"], found["chosen"]) == (8, 2)
    assert samples.record(8) is None and samples.record(-1) is None


def test_a_text_that_is_searched_for_again_is_found_in_what_has_come_since(run_dir):
    samples, window = Samples(run_dir.samples_file), Choice(text="window", order="oldest")
    before = numbers(samples, window)
    assert len(before) == 12 and numbers(samples, window) == before
    assert numbers(samples, Choice(text="window", step_from=6)) == before[-2:]
    record(run_dir.path, range(7, 8), True)
    assert numbers(samples, window) == [*before, 51, 55]
    assert len(numbers(samples, Choice(text="response 7-0"))) == 3
    assert numbers(samples, window) == [*before, 51, 55]


def test_a_record_is_whole_and_a_list_has_its_beginning(run_dir):
    samples = Samples(run_dir.samples_file)
    whole = samples.record(3)
    assert whole is not None and whole["messages"][1]["content"] == "a tool says 42"
    assert whole["rewards"] == {"right": 0.75, "short": 0.75}
    brief = samples.choose(Choice(), 0, 1)["list"][0]
    assert brief["response"] == "response 6-0-0" and brief["turns"] == 0
    assert samples.choose(Choice(text="window"), 0, 1)["list"][0]["response"] == PLANTED
