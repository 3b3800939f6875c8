"""The metrics of an eval set by hand, and what rows cannot be grouped."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lora_moe_rl.config import EvalSetConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.errors import DataError
from lora_moe_rl.evaluation.scoring import check_values, sample_lines, set_metrics

NAN = math.nan


def a_group(row: int, texts: list[str], rewards: list[float], failed=0, **columns) -> Group:
    samples = [
        Sample(
            (
                Segment.given("user", [5, 6]),
                Segment.sampled([7] * len(text), np.zeros(len(text)), 3),
            ),
            "length" if text == "long" else "stop",
            text,
        )
        for text in texts
    ]
    failures = [f"prompt {row}: no"] * failed
    prompt = Prompt(row, f"{row}+1=", [5, 6], columns, "eval/sums")
    return Group(prompt, samples, None, np.array(rewards, np.float32), failures)


GROUPS = [
    a_group(0, ["1", "1", "2", "3"], [1, 1, 0, 0], level="easy"),
    a_group(1, ["5", "6", "6", "long"], [1, 0, 0, 0.5], level="hard/er"),
    a_group(2, ["7", "8", "9", "9"], [NAN, 0, 0, 0], failed=1, level="hard/er"),
]


def test_the_metrics_by_hand():
    settings = EvalSetConfig(samples=4, answer="text")
    found = set_metrics("sums", settings, GROUPS)
    means = [0.5, 0.375, 0.0]  # the sample without a reward does not count
    assert found["eval/sums/avg"] == pytest.approx(np.mean(means))
    half = 1.959963984540054 * np.std(means, ddof=1) / math.sqrt(3)
    assert found["eval/sums/avg_ci95"] == pytest.approx(half)
    assert found["eval/sums/pass@1"] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    # 1 - C(2,2)/C(4,2), 1 - C(3,2)/C(4,2), 0
    assert found["eval/sums/pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    # The third has three samples with a reward: no pass@4.
    assert found["eval/sums/pass@4"] == pytest.approx(1.0)
    # "1" is right; "6" is wrong; "9" is wrong
    assert found["eval/sums/maj@4"] == pytest.approx(1 / 3)
    assert (found["eval/sums/prompts"], found["eval/sums/failed"]) == (3, 1)
    assert found["eval/sums/none"] == 0
    assert found["eval/sums/response_length"] == pytest.approx((11 + 4) / 12)
    assert found["eval/sums/truncated"] == pytest.approx(1 / 12)


def test_what_counts_as_right_can_be_less_than_1():
    found = set_metrics("sums", EvalSetConfig(samples=4, right_at=0.5, pass_at=(1,)), GROUPS[1:2])
    assert found["eval/sums/pass@1"] == 0.5 and "eval/sums/pass@2" not in found


def test_a_reward_as_large_as_the_bound_is_right_whatever_float32_makes_of_it():
    """0.7 and 0.9 are less in float32 than the numbers that are written so."""
    for bound in (0.7, 0.9):
        settings = EvalSetConfig(samples=2, right_at=bound, answer="text")
        groups = [a_group(0, ["1", "1"], [bound, bound])]
        found = set_metrics("sums", settings, groups)
        assert found["eval/sums/pass@1"] == found["eval/sums/maj@2"] == 1.0
        assert all(line["right"] is True for line in sample_lines("sums", settings, groups))


def test_metrics_by_a_column_are_those_of_its_prompts_alone():
    settings = EvalSetConfig(samples=4, group_by="level")
    found = set_metrics("sums", settings, GROUPS)
    alone = set_metrics("sums", EvalSetConfig(samples=4), GROUPS[1:])
    for what in ("avg", "pass@2", "prompts", "failed", "truncated"):
        assert found[f"eval/sums/level=hard_er/{what}"] == alone[f"eval/sums/{what}"]
    assert found["eval/sums/level=easy/avg"] == 0.5


def test_a_set_without_any_reward_has_no_numbers_and_says_how_many_had_none():
    found = set_metrics("sums", EvalSetConfig(samples=2), [a_group(0, ["1", "2"], [NAN, NAN])])
    assert math.isnan(found["eval/sums/avg"]) and math.isnan(found["eval/sums/pass@1"])
    assert found["eval/sums/none"] == 2 and found["eval/sums/failed"] == 0


@pytest.mark.parametrize(
    ("samples", "given", "ks"),
    [(1, (), [1]), (8, (), [1, 2, 4, 8]), (6, (), [1, 2, 4, 6]), (8, (8, 3, 3), [3, 8])],
)
def test_the_k_of_pass_at_k(samples, given, ks):
    assert EvalSetConfig(samples=samples, pass_at=given).ks == ks


def test_samples_are_kept_with_what_they_were_judged_by():
    settings = EvalSetConfig(samples=4, answer="number", group_by="level")
    lines = sample_lines("sums", settings, GROUPS)
    assert len(lines) == 12 and [line["sample"] for line in lines[:5]] == [0, 1, 2, 3, 0]
    assert lines[0] == {
        "set": "sums", "row": 0, "sample": 0, "prompt": "0+1=", "response": "1", "reward": 1.0,
        "right": True, "finish_reason": "stop", "tokens": 1, "token_ids": [7], "answer": "1",
        "group": "easy",
    }  # fmt: skip
    same = settings.model_copy(update={"group_by": "answer"})  # a column of a name of ours
    columns = {"answer": "gold"}
    for group in GROUPS:
        group.prompt.columns.update(columns)
    assert sample_lines("sums", same, GROUPS)[0] | lines[0] == lines[0] | {"group": "easy"}
    assert sample_lines("sums", same, GROUPS)[0]["group"] == "gold"
    assert lines[7]["answer"] is None and lines[8]["right"] is False


def test_groups_in_any_script_have_metrics_of_their_names_and_samples_their_values():
    settings = EvalSetConfig(samples=4, group_by="level").at("eval.sets.sums")
    values = ["代数", "几何", "géométrie (plane)"]
    rows = {number: {"level": value} for number, value in enumerate(values)}
    check_values(settings, rows)
    groups = [a_group(n, ["1"] * 4, [1, 0, 0, 0], level=values[n]) for n in rows]
    found = set_metrics("sums", settings, groups)
    for value in ("代数", "几何", "géométrie__plane_"):
        assert found[f"eval/sums/level={value}/avg"] == 0.25
    assert [line["group"] for line in sample_lines("sums", settings, groups)[::4]] == values
    groups[0].prompt.columns["level"] = 7
    assert sample_lines("sums", settings, groups)[0]["group"] == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"level": 1}, {"other": 2}], "group_by=level: row 1 has no such column; it has other"),
        ([{"level": i} for i in range(51)], "has 51 values"),
        (
            [{"level": "a/b"}, {"level": "a b"}, {"level": "c"}],
            "'a b' and 'a/b' would have the same metrics, of the name a_b",
        ),
    ],
)
def test_rows_that_cannot_be_grouped(values, message):
    settings = EvalSetConfig(group_by="level").at("eval.sets.sums")
    with pytest.raises(DataError) as caught:
        check_values(settings, dict(enumerate(values)))
    assert message in str(caught.value) and "eval.sets.sums.group_by" in str(caught.value)
