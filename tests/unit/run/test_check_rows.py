"""`lora-moe-rl check` of data, rewards and metrics: what is strange, and what is left out."""

import json

import pytest

pytestmark = pytest.mark.seconds


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("same", "tells the answer from nothing else: it gave 0.5 for the answer '0', 0.5 for ''"),
        ("none", "tells the answer from nothing else: it gave none for"),
        ("half", "1 of 3 rewards failed"),
        ("slow", "took longer than 5 s for 3 made-up completions; a run waits up to reward.timeou"),
    ],
)
def test_a_reward_that_is_strange_is_a_warning(check, function, told):
    code, found, _ = check(f"reward.function=rewards.py:{function}")
    assert code == 0 and found["reward"][0] == "warning" and told in found["reward"][1]


def test_several_functions_are_called_each_in_the_style_that_it_is_written_in(check):
    several = ("reward.functions.a=rewards.py:right", "reward.functions.b=rewards.py:verls")
    code, found, _ = check("reward.function=null", *several)
    given = "gave 1 for the answer '0', 0 for '', 0 for 'I do not know.'"
    assert code == 0 and found["reward"][1].count(given) == 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("pairs", "returned [1.0, 2.0], not a finite number in float32"),
        ("group", "returned [1.0] for 3 samples, not one reward for each"),
        ("needs", "it takes level, and the row has no such column: it has answer"),
    ],
)
def test_rewards_of_another_number_are_an_error_whatever_share_may_fail(check, function, reason):
    several = ("reward.functions.a=rewards.py:right", f"reward.functions.b=rewards.py:{function}")
    code, found, _ = check("reward.function=null", "reward.max_failed=1", *several)
    assert code == 2 and found["reward"][0] == "error" and reason in found["reward"][1]
    assert found["reward"][1].startswith("reward.functions.b.function=")


def test_columns_that_a_reward_lacks_or_does_not_see_are_named(check, tmp_path):
    row = {"prompt": "a", "completions": "b", "target": "c"}
    (tmp_path / "odd.jsonl").write_text(json.dumps(row) + "\n")
    odd = ("data.path=odd.jsonl", "algorithm.prompts_per_step=1")
    code, found, _ = check(*odd, "reward.function=lora_moe_rl.rewards:exact_match")
    assert code == 2
    assert "it takes answer, and the row has no such column: it has" in found["reward"][1]
    assert "target; data.answer_key=COLUMN makes one the answer" in found["reward"][1]
    code, found, _ = check(*odd, "data.answer_key=target")
    assert code == 0 and found["reward"][0] == "warning"
    assert "sees the column 'completions' of the rows" in found["reward"][1]


SETS = (
    "data.path=null",
    "data.order=shuffle",
    "data.sets.sums=rows.jsonl",
    "data.sets.sums.ratio=2",
)


def test_every_data_set_is_looked_at(check, tmp_path):
    (tmp_path / "few.jsonl").write_text('{"prompt": "a" , "answer": "b"}\n')
    few = ("data.sets.few=few.jsonl", "data.sets.few.reward=rewards.py:same")
    code, found, prompts = check(*SETS, *few)
    assert code == 0
    rows = "sums: {0}/rows.jsonl: 4 rows; few: {0}/few.jsonl: 1 rows"
    assert found["data"] == ("ok", rows.format(tmp_path))
    assert found["reward"][0] == "warning"
    assert found["reward"][1].startswith("few: the reward tells the answer from nothing else: it")
    assert "\nfew, prompt 0, 1 tokens\na\ncolumns: {'answer': 'b'}" in prompts
    assert prompts.startswith("sums, prompt 0") and prompts.count("tokens\n") == 2


def test_a_data_set_that_has_to_be_fetched_does_not_hide_what_is_wrong_with_others(check):
    code, found, _ = check(*SETS, "data.sets.far=org/name")
    assert code == 0 and found["data"] == (
        "skipped",
        "there is no file org/name here; it is taken for a data set of the hub, which a run "
        "fetches",
    )
    assert "sums: " in found["reward"][1] and "far: " in found["reward"][1]
    assert "not called, that needs the data" in found["reward"][1]
    code, found, _ = check(*SETS, "data.sets.far=org/name", "data.sets.gone=gone.jsonl")
    assert code == 2 and "data.sets.gone.path=gone.jsonl: there is no such" in found["data"][1]


def test_a_generator_that_raises_is_one_line(check, tmp_path):
    (tmp_path / "rows.py").write_text(
        "def rows():\n    yield {}['prompt']\n"
        "def later():\n    yield {'prompt': '1+1=', 'answer': '2'}\n    yield {}['prompt']\n"
        "def odd():\n    while True:\n"
        "        yield {'prompt': '1+1=', 'answer': '2', 'meta': {1: 'a', 'b': 2, (1, 2): 3}}\n"
    )

    def generated(name: str) -> tuple[str, ...]:
        return "data.path=null", "data.order=shuffle", f"data.generator=rows.py:{name}"

    code, found, _ = check(*generated("rows"))
    assert code == 2 and found["data"][0] == "error"
    assert "rows.py:rows, row 0: raised KeyError('prompt') in " in found["data"][1]
    assert found["data"][1].endswith("rows.py, line 2")
    code, found, _ = check(*generated("later"))
    assert code == 2 and found["data"][0] == "ok" and found["prompts"][0] == "error"
    assert "rows.py:later, row 1: raised KeyError('prompt') in " in found["prompts"][1]
    assert check(*generated("odd"))[0] == 0


def test_prompts_that_are_left_out_are_counted(check):
    settings = ("data.too_long=drop", "data.limit=3", "model.max_length=10")
    _, found, _ = check(*settings, "rollout.max_response_tokens=6")
    assert found["prompts"] == ("ok", "4 to 4 tokens of 4 that fit")
    code, found, _ = check(*settings, "rollout.max_response_tokens=7")
    assert code == 2 and "3 have prompts of more than 3 tokens" in found["prompts"][1]


def test_fewer_prompts_than_a_step_takes_are_a_warning(check, tmp_path):
    few = ("data.limit=3", "algorithm.prompts_per_step=4")
    code, found, _ = check(*few)
    state, told = found["prompts"]
    assert code == 0 and state == "warning"
    assert "rows.jsonl has 3 prompts (data.limit=3), and a step takes 4: each step has" in told
    assert "lower algorithm.prompts_per_step, or give more rows" in told
    assert check("algorithm.prompts_per_step=4")[1]["prompts"][0] == "ok"  # there are 4 rows


def test_rows_that_are_filtered_are_counted(check, tmp_path):
    rows = [{"prompt": "a", "answer": "b", "rate": rate} for rate in (0, 0.5, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, found, _ = check('data.filter={"rate": [0.1, 0.9]}')
    assert code == 0
    assert found["prompts"] == (
        "ok",
        "1 to 1 tokens of 504 that fit, 2 rows are left out by the filter",
    )


def test_a_best_metric_that_few_checkpoints_have_or_that_is_upside_down_is_a_warning(
    check, tmp_path
):
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    best = ("checkpoint.keep_best=1", "checkpoint.best_metric=eval/held/avg", "trainer.steps=40")
    held = (*best, "eval.sets.held.path=held.jsonl", "checkpoint.every=10")
    code, found, _ = check(*held, "eval.every=15")
    assert code == 0 and found["layout"][0] == "warning"
    assert "eval/held/avg, which 2 of the run's 4 checkpoints have" in found["layout"][1]
    assert check(*held, "eval.every=5")[1]["layout"][0] == "ok"
    told = check(*held, "eval.every=5", "checkpoint.best_is=smallest")[1]["layout"]
    assert told[0] == "warning" and "of eval/held/avg the largest is the best" in told[1]


def test_rows_without_an_answer_among_others_are_told(check, tmp_path):
    rows = [{"prompt": f"{i}+1="} | ({"answer": i + 1} if i % 4 else {}) for i in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, found, _ = check("data.limit=8")
    assert code == 0 and found["reward"][0] == "warning"
    assert "2 of 8 rows have no answer (" in found["reward"][1]
    assert "rows.jsonl, line 4 is the first): the reward is given None" in found["reward"][1]


@pytest.mark.parametrize("answer", [{}, {"answer": None}], ids=["no column", "null"])
def test_answers_that_are_all_null_are_told_and_none_are_not(answer, check, tmp_path):
    rows = [{"prompt": f"{i}+1="} | answer for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, found, _ = check("data.limit=8")
    assert ("8 of 8 rows have no answer (" in found["reward"][1]) == bool(answer)


def test_held_out_rows_that_are_left_out_are_told(check, tmp_path):
    rows = [{"prompt": "1+" * (i % 2) * 300 + "1=", "answer": "1", "rate": i} for i in range(6)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = ("eval.sets.held.path=held.jsonl", "eval.sets.held.too_long=drop")
    code, found, _ = check(*held, 'eval.sets.held.filter={"rate": [1, 6]}')
    assert code == 0 and found["prompts"][0] == "warning"
    assert "eval/held: 3 prompts of more than 504 tokens are left out" in found["prompts"][1]
    told = check(*held[:1], 'eval.sets.held.filter={"rate": [0, 0]}')[1]["prompts"]
    assert told[0] == "ok" and "eval/held: 1 prompts, 5 rows are left out by the filter" in told[1]
