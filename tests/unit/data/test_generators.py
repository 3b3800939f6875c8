"""Rows that a function makes."""

import importlib.util
from itertools import islice

import pytest
from prompt_sources import TOKENIZER, source, texts

from lora_moe_rl.config import DataConfig
from lora_moe_rl.data import prompts
from lora_moe_rl.data.generators import numbered
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.errors import ConfigError, DataError
from lora_moe_rl.files.importing import load_file


def test_generators(generators):
    counted = source(generator=f"{generators}:counting", seed=8).next(3)
    assert texts(counted) == ["8:0", "8:1", "8:2"] and counted[2].columns == {"answer": 2}
    assert texts(source(generator=f"{generators}:three").next(5)) == ["a", "b", "c", "a", "b"]
    assert texts(source(generator=f"{generators}:three", limit=2).next(3)) == ["a", "b", "a"]
    with pytest.raises(DataError, match="none gave no rows"):
        source(generator=f"{generators}:none").next(1)
    bad = source(generator=f"{generators}:bad")
    with pytest.raises(DataError, match=r"bad, row 1: the prompt has 25 tokens; at most 24"):
        bad.next(2)


@pytest.mark.parametrize(
    ("args", "prompt"),
    [
        ({"level": 1}, "1+9s3"),
        ({"level": 2, "sign": "-", "most": 5}, "2-5s3"),
        ({"level": "x", "seed": 7}, "x+9s7"),
    ],
)
def test_a_generator_gets_its_arguments(generators, args, prompt):
    assert texts(source(generator=f"{generators}:sums", args=args).next(1)) == [prompt]


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("sums", {"levle": 1}, r"data.args.levle: data.generator=.*:sums has no argument 'levle'; "
         r"did you mean level\? it takes level, most, sign, seed"),
        ("sums", {}, r":sums needs an argument 'level': set data.args.level=VALUE"),
        ("three", {"level": 1}, r"has no argument 'level'; it takes none"),
    ],
)  # fmt: skip
def test_arguments_that_a_generator_does_not_take_are_refused(generators, name, args, reason):
    with pytest.raises(ConfigError, match=reason):
        source(generator=f"{generators}:{name}", args=args)


def test_a_generator_that_takes_any_argument_gets_all(generators):
    drawn = source(generator=f"{generators}:anything", args={"b": 1, "a": 2})
    assert texts(drawn.next(1)) == ["['a', 'b']"]


def test_without_reasoning_gym_its_error_says_what_to_install():
    if importlib.util.find_spec("reasoning_gym"):
        pytest.skip("reasoning_gym is installed")
    generator = "lora_moe_rl.data.generators:reasoning_gym"
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        source(generator=generator, args={"task": "leg_counting"})


def test_several_tasks_of_reasoning_gym_come_in_their_weights_each_scored_as_its_own():
    pytest.importorskip("reasoning_gym")
    from lora_moe_rl.rewards import reasoning_gym

    generator = "lora_moe_rl.data.generators:reasoning_gym"
    task = {"leg_counting": 3, "chain_sum": {"weight": 1, "min_terms": 2, "max_terms": 2}}
    args = {"task": task, "size": 100}
    drawn = PromptSource(DataConfig(generator=generator, args=args), TOKENIZER, 3, 900).next(200)
    of = [prompt.columns["metadata"]["source_dataset"] for prompt in drawn]
    assert set(of) == set(task) and 0.65 < of.count("leg_counting") / len(of) < 0.85
    assert len({prompt.text for prompt in drawn[:100]} & {p.text for p in drawn[100:]}) < 10
    for name in task:
        prompt = drawn[of.index(name)]
        answer, about = prompt.columns["answer"], prompt.columns["metadata"]
        texts = [f"<answer>{answer}</answer>", "<answer>-1</answer>"]
        scores = reasoning_gym([prompt.text] * 2, texts, [answer] * 2, [about] * 2)
        assert scores[0] == 1 and scores[1] < 0.1


def test_rows_of_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    from lora_moe_rl.rewards import reasoning_gym

    generator = "lora_moe_rl.data.generators:reasoning_gym"
    settings = {"task": "chain_sum", "size": 4, "max_terms": 2}
    drawn = PromptSource(DataConfig(generator=generator, args=settings), TOKENIZER, 3, 500).next(8)
    assert len({prompt.text for prompt in drawn}) == 8  # the second 4 are others
    prompt = drawn[0]
    answer, about = prompt.columns["answer"], prompt.columns["metadata"]
    answers = [f"so <answer>1</answer>, no, <answer> {answer} </answer>.", answer, "", "x"]
    scores = reasoning_gym([prompt.text] * 4, answers, [answer] * 4, [about] * 4)
    assert scores[:2] == [1, 1] and max(scores[2:]) < 0.1
    for args, reason in [
        ({"task": "chain_sun"}, "no task 'chain_sun'; did you mean chain_sum"),
        ({"task": "chain_sum", "terms": 3}, "chain_sum refuses its settings: .*'terms'"),
        ({"task": {"chain_sum": 1, "chain_sun": 1}}, "no task 'chain_sun'"),
        ({"task": {"chain_sum": -1}}, "refuses its settings: Weight must be positive"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            source(generator=generator, args=args)


def test_rows_of_a_generator_outside_a_filter_are_left_out(generators):
    drawn = source(generator=f"{generators}:counting", filter={"answer": [2, 5]})
    assert texts(drawn.next(4)) == ["3:2", "3:3", "3:4", "3:5"] and drawn.filtered == 2
    with pytest.raises(DataError, match="gave no rows that can be used: 10002 are outside data.f"):
        drawn.next(1)
    again = source(generator=f"{generators}:counting", filter={"answer": [2, 5]})
    again.next(2)
    resumed = source(generator=f"{generators}:counting", filter={"answer": [2, 5]})
    resumed.load_state_dict(again.state_dict())
    assert texts(resumed.next(2)) == ["3:4", "3:5"]


def test_rows_of_a_generator_may_be_left_out_too(generators):
    drawn = source(generator=f"{generators}:bad", too_long="drop")
    assert texts(drawn.next(3)) == ["fine", "fine", "fine"] and drawn.dropped == 2
    resumed = source(generator=f"{generators}:some_long", too_long="drop")
    resumed.next(3)
    again = source(generator=f"{generators}:some_long", too_long="drop")
    again.load_state_dict(resumed.state_dict())
    assert texts(again.next(3)) == texts(resumed.next(3)) == ["7", "9", "11"]
    for name in ("only_long", "ever_longer"):
        with pytest.raises(DataError, match=f"{name} gave no rows that can be used: .*too_long=dr"):
            source(generator=f"{generators}:{name}", too_long="drop").next(1)


def test_numbers_of_tasks_follow_from_the_seed_and_stay_below_their_count():
    drawn = list(islice(numbered(seed=3, tasks=5), 50))
    assert drawn == list(islice(numbered(seed=3, tasks=5), 50))
    assert drawn != list(islice(numbered(seed=4, tasks=5), 50))
    assert {row["task"] for row in drawn} == set(range(5))
    (message,) = drawn[0]["prompt"]
    assert message == {"role": "user", "content": f"task {drawn[0]['task']}"}


def test_a_generator_that_ends_within_a_step_is_told_of(generators):
    three = source(generator=f"{generators}:three")
    assert three.repeated(3) == []
    (told,) = three.repeated(4)
    assert told.startswith(f"data.generator={generators}:three has 3 prompts, and a step takes 4")
    assert texts(three.next(2)) == ["a", "b"]  # none was drawn by looking
    assert source(generator=f"{generators}:counting").repeated(1000) == []
    assert source(generator=f"{generators}:counting", limit=9).repeated(10) != []


def test_a_generator_that_takes_its_time_is_not_waited_for(tmp_path, monkeypatch):
    """As one that asks a server for each row, of which a step takes hundreds."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\n"
        "drawn = 0\n"
        "def rows():\n"
        "    global drawn\n"
        "    for _ in range(40):\n"
        "        time.sleep(0.02)\n"
        "        drawn += 1\n"
        '        yield {"prompt": str(drawn)}\n'
    )
    slow = source(generator=f"{file}:rows")
    found = load_file(file)
    found.drawn = 0
    monkeypatch.setattr(prompts, "LOOK_S", 0.1)
    assert slow.repeated(1000) == [] and found.drawn < 10
    monkeypatch.setattr(prompts, "LOOK_S", 60)
    assert "has 40 prompts" in slow.repeated(1000)[0]


def test_a_generator_may_change_one_object_from_row_to_row(tmp_path):
    (tmp_path / "rows.py").write_text(
        "def rows():\n"
        "    meta, message = {}, {'role': 'user'}\n"
        "    for number in range(9):\n"
        "        meta['want'], message['content'] = number, str(number)\n"
        "        yield {'prompt': [message], 'metadata': meta}\n"
    )
    drawn = source(generator=f"{tmp_path}/rows.py:rows").next(3)
    assert [one.columns["metadata"]["want"] for one in drawn] == [0, 1, 2]
    assert [one.text[0]["content"] for one in drawn] == ["0", "1", "2"]
