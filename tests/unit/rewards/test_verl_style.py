"""verl's functions are called as they are."""

from __future__ import annotations

import asyncio

import pytest

from lora_moe_rl.rewards.calling import Logged, Reward, check

FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("gsm8k", {"index": 3}), (data_source, extra_info)
    if solution_str == "raise":
        raise RuntimeError("no such luck")
    if solution_str == "dict":
        return {"score": 0.5, "acc": True}
    if solution_str == "no score":
        return {"acc": False}
    if solution_str == "pair":
        return 1.0, {"acc": True}
    if solution_str == "scores":
        return {"score": [1.0, 0.0], "why": "two"}
    return float(solution_str == ground_truth)

async def in_its_own_time(solution_str, ground_truth, data_source, extra_info, bonus=0.0, **kwargs):
    assert not kwargs and (data_source, extra_info) == ("", {})
    if solution_str == "raise":
        raise RuntimeError("no such luck")
    return float(solution_str == ground_truth) + bonus

def batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    assert data_sources == ["gsm8k"] * 3 and extra_infos == [{"index": 3}] * 3
    right = [a == b for a, b in zip(solution_strs, ground_truths)]
    return [{"score": one + bonus, "acc": one} if i else one + bonus for i, one in enumerate(right)]

async def batch_in_its_own_time(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(a == b) for a, b in zip(solution_strs, ground_truths)]

def of_two(solution_str, ground_truth):
    return float(solution_str == ground_truth)

def one_of_a_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "verls.py"
    path.write_text(FUNCTIONS)
    return path


def arguments(completions, **columns):
    return {
        "prompt": "p",
        "completions": completions,
        "completion_ids": [[1]] * len(completions),
        "columns": columns,
        "trainer_state": {"global_step": 0, "max_steps": 1},
    }


def test_a_plain_function_is_called_once_a_sample(file):
    row = {"answer": "7", "data_source": "gsm8k", "extra_info": {"index": 3}}
    logged = Logged(5)
    reward = Reward.load(f"{file}:compute_score", {})
    called = reward.call(arguments(["7", "8", "raise", "dict", "no score"], **row), logged)
    right, wrong, raised, scored, without = check(called, 5)
    assert (right, wrong) == (1.0, 0.0)
    assert raised.startswith(f"raised RuntimeError('no such luck') in {file}, line ")
    assert scored == 0.5 and "has no 'score'" in without
    assert logged.columns == {"acc": [None, None, None, True, False]}


def test_returns_of_mixed_shape_fail_alone(file):
    row = {"answer": "7", "data_source": "gsm8k", "extra_info": {"index": 3}}
    logged = Logged(4)
    reward = Reward.load(f"{file}:compute_score", {})
    called = reward.call(arguments(["7", "pair", "scores", "dict"], **row), logged)
    right, pair, scores, scored = check(called, 4)
    assert (right, scored) == (1.0, 0.5)
    reason = "not a finite number in float32; a sample has one reward"
    assert pair.startswith(f"returned (1.0, {{'acc': True}}), {reason}")
    assert scores.startswith(f"returned [1.0, 0.0], {reason}")
    assert logged.columns == {
        "why": [None, None, "two", None],
        "acc": [None, None, None, True],
    }


def test_only_keywords_that_it_names_are_passed(file):
    reward = Reward.load(f"{file}:of_two", {})
    assert reward.call(arguments(["7", "8"], answer="7"), Logged(2)) == [1.0, 0.0]


def test_messages_are_given_as_text(file):
    row = {"answer": "7", "data_source": "gsm8k", "extra_info": {"index": 3}}
    completion = [{"role": "assistant", "content": "7"}]
    called = Reward.load(f"{file}:compute_score", {}).call(
        arguments([completion], **row), Logged(1)
    )
    assert called == [1.0]


def test_an_async_function_takes_arguments_and_rows_without_a_source(file):
    reward = Reward.load(f"{file}:in_its_own_time", {"bonus": 0.25})
    assert reward.is_async
    called = asyncio.run(reward.call(arguments(["7", "raise"], answer="7"), Logged(2)))
    right, raised = check(called, 2)
    assert right == 1.25
    assert raised.startswith(f"raised RuntimeError('no such luck') in {file}, line ")


def test_a_row_without_an_answer_is_an_error(file):
    reward = Reward.load(f"{file}:compute_score", {})
    with pytest.raises(ValueError, match="ground_truth is the answer, and the row has none"):
        reward.call(arguments(["7"]), Logged(1))


def test_a_function_of_verls_batch_manager_is_called_once_a_prompt(file):
    row = {"answer": "7", "data_source": "gsm8k", "extra_info": {"index": 3}}
    logged = Logged(3)
    reward = Reward.load(f"{file}:batch", {"bonus": 0.25})
    called = reward.call(arguments(["7", "8", "7"], **row), logged)
    assert check(called, 3) == [1.25, 0.25, 1.25]
    assert logged.columns == {"acc": [None, False, True]}
    reward = Reward.load(f"{file}:batch_in_its_own_time", {})
    assert reward.is_async
    assert asyncio.run(reward.call(arguments(["7", "8"], **row), Logged(2))) == [1.0, 0.0]
    called = Reward.load(f"{file}:one_of_a_batch", {}).call(arguments(["7"], **row), Logged(1))
    (told,) = check(called, 1)
    assert told.startswith("returned 1.0 for 1 samples, not one reward for each")
