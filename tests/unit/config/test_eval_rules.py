"""Evaluations that cannot be, and what of them a config keeps."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.eval_rules import prompt_room
from lora_moe_rl.config.files import read_config_file, to_yaml
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.config.recipes import resolve
from lora_moe_rl.errors import ConfigError
from tests.helpers.settings import changed

AGENT = ("environment=external", "environment.command=agent")
SET = "eval.sets.sums.path=sums.jsonl"
AHEAD = ("schedule.lag=1", "algorithm.correction=tis")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval.every=5"], "eval.every=5 has no effect without eval.sets"),
        (["eval.at_start=false"], "eval.at_start=false has no effect without eval.sets"),
        (
            [SET, "eval.sets.sums.pass_at=1,4"],
            "pass@4 needs a k from 1 to eval.sets.sums.samples=1",
        ),
        ([SET, "eval.sets.sums.pass_at=0"], "pass@0 needs a k from 1 to"),
        (
            [SET, "eval.sets.sums.temperature=0", "eval.sets.sums.samples=4"],
            "temperature=0 takes the likeliest token each time, and eval.sets.sums.samples=4",
        ),
        ([SET, "eval.sets.sums.temperature=0.001"], "is not what vLLM would sample with"),
        ([SET, "eval.sets.sums.temperature=3"], "temperature=3 must be at most 2"),
        ([SET, "eval.sets.sums.top_p=0"], "top_p=0 must be greater than 0"),
        (
            [SET, "eval.sets.sums.temperature=0", "eval.sets.sums.top_k=20"],
            "eval.sets.sums.top_k=20 has no effect with eval.sets.sums.temperature=0",
        ),
        (
            [SET, "eval.sets.sums.max_response_tokens=512"],
            "eval.sets.sums.max_response_tokens=512 leaves no room for a prompt within "
            "model.max_length=512",
        ),
        (
            [SET, "eval.sets.sums.max_response_tokens=16", *AGENT],
            "eval.sets.sums.max_response_tokens=16 has no effect with environment=external",
        ),
        ([SET, "eval.sets.sums.answer=number"], "eval.sets.sums.samples=1 make no majority"),
        (["eval.sets.sums.generator=m:f"], "may never end: set eval.sets.sums.limit"),
        ([SET, "eval.sets.sums.generator=m:f"], "are both set"),
        ([SET, "eval.sets.sums.order=shuffle"], "order='shuffle' may hold only what matches"),
        ([SET, "eval.sets.sums.reward=good"], "eval.sets.sums.reward=good: 'good' is not of the"),
        ([SET, "eval.sets.sums.split=test"], "eval.sets.sums.split=test has no effect"),
        ([SET, "eval.sets.sums.sample=3"], "did you mean eval.sets.NAME.samples?"),
        (['eval.sets={"a/b":{"path":"c"}}'], "eval.sets has a set named 'a/b'"),
        (
            [SET, *AHEAD, "refit.slots=3"],
            "keeps a slot of its own beside the 3 of sampling ahead; set refit.slots=4 or more (it "
            "is 3)",
        ),
        (
            [SET, *AHEAD, "schedule.lag=4", "schedule.in_flight=continue", "refit.slots=2"],
            "keeps a slot of its own beside the 2 of sampling ahead; set refit.slots=3 or more (it "
            "is 2)",
        ),
    ],
)
def test_evaluations_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError) as caught:
        changed(*arguments)
    assert message in str(caught.value)


def test_evaluation_with_sampling_ahead_needs_one_slot_more():
    assert changed(SET, *AHEAD, "refit.slots=4").refit.slots == 4
    assert changed(*AHEAD, "refit.slots=3").refit.slots == 3
    continued = ("schedule.lag=4", "schedule.in_flight=continue")
    assert changed(SET, *AHEAD, *continued, "refit.slots=3").refit.slots == 3


def test_prompts_of_a_set_have_the_room_that_its_own_responses_leave():
    config = changed(
        "data.path=d.jsonl", "model.max_length=100", "rollout.max_response_tokens=30", SET,
        *("eval.sets.more.path=m.jsonl", "eval.sets.more.max_response_tokens=90"),
    )  # fmt: skip
    rooms = {name: prompt_room(config, source) for name, source in config.sources().items()}
    assert rooms == {"": 70, "eval/sums": 70, "eval/more": 10}


def test_a_set_has_the_runs_reward_or_its_own():
    config = changed(SET, "eval.sets.more.path=m.jsonl", "eval.sets.more.reward=m:g",
                     "reward.function=m:f")  # fmt: skip
    found = {name: [one.function for one in own] for name, own in config.eval_rewards().items()}
    assert found == {"eval/sums": ["m:f"], "eval/more": ["m:g"]}
    assert list(config.rewards()) == [""]


def test_a_reward_function_may_be_of_an_eval_set_alone():
    functions = ("reward.functions.a=m:a", "reward.functions.b=m:b")
    sets = ("data.sets.x.path=x.jsonl", "data.sets.x.reward=a")
    with pytest.raises(ConfigError, match="reward.functions.b has no effect"):
        changed(*functions, *sets)
    config = changed(*functions, *sets, SET, "eval.sets.sums.reward=b")
    assert [one.name for one in config.eval_rewards()["eval/sums"]] == ["b"]


def test_a_saved_config_keeps_its_sets_and_knows_their_files_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sums.jsonl", "my.py"):
        (tmp_path / name).write_text("")
    config = resolve(changed(SET, "eval.sets.sums.samples=4", "eval.sets.sums.reward=my.py:f"))
    one = config.eval.sets["sums"]
    assert one.path == str(tmp_path / "sums.jsonl") and one.reward == f"{tmp_path / 'my.py'}:f"
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = with_settings(RunConfig(), read_config_file(tmp_path / "config.yaml"))
    assert again == config


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({"every": 2}, [0, 2, 4, 5]),
        ({}, [0, 5]),
        ({"every": 5, "at_start": False}, [5]),
        ({"every": 2, "sets": {}}, []),
    ],
)
def test_which_steps_are_evaluated(settings, due):
    sets = {"sums": {"path": "sums.jsonl"}}
    config = RunConfig.model_validate({"eval": {"sets": sets, **settings}})
    assert [step for step in range(6) if config.eval.is_due(step, last=5)] == due
