"""How a user's function is called: TRL's keywords, arguments, classes; what it logs."""

from __future__ import annotations

import asyncio
import math
import re
from types import MappingProxyType

import numpy as np
import pytest

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.calling import Logged, Reward, check

FUNCTIONS = '''
def trl(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    """As in TRL's docs: a reward that grows with the run."""
    share = trainer_state.global_step / trainer_state.max_steps
    log_extra("length", [len(c) for c in completions])
    log_metric("share", share)
    log_metric("share", 3 * share)
    return [share * level for level in columns["level"]]

def scaled(completions, level, scale=1.0, **kwargs):
    assert "log_extra" in kwargs
    return [scale * one for one in level]

class Made:
    def __init__(self, scale):
        self.scale = scale
        if scale < 0:
            raise ValueError("too small")

    async def __call__(self, completions, **columns):
        return [self.scale * float(one) for one in columns["scale"]]

class Still:
    pass

def bad_extra(completions, log_extra):
    log_extra("one", [1])

def taken(completions, log_metric):
    log_metric("mine/mean", 1.0)

def epoch(trainer_state, completions):
    return [trainer_state.epoch] * len(completions)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "called.py"
    path.write_text(FUNCTIONS)
    return path


def arguments(completions=("a", "bc"), **columns):
    return {
        "prompt": "p",
        "completions": list(completions),
        "completion_ids": [[1]] * len(completions),
        "columns": columns,
        "trainer_state": {"global_step": 10, "max_steps": 40},
    }


def called(spec, columns=None, **args):
    logged = Logged(2)
    return Reward.load(spec, args).call(arguments(**columns or {}), logged), logged


def test_a_function_of_trl_is_called_as_it_is(file):
    returned, logged = called(f"{file}:trl", {"level": 4})
    assert returned == [1.0, 1.0]
    assert logged.columns == {"length": [1, 2]} and logged.metrics == {"share": [0.25, 0.75]}


def test_what_trainer_state_does_not_have_is_an_error(file):
    with pytest.raises(AttributeError, match="has global_step and max_steps here, and no epoch"):
        called(f"{file}:epoch")


def test_arguments_win_over_columns_of_their_name(file):
    assert called(f"{file}:scaled", {"level": 2, "scale": 7}, scale=0.5)[0] == [1.0, 1.0]
    assert called(f"{file}:scaled", {"level": 2}, scale=3.0)[0] == [6.0, 6.0]


def test_a_class_is_made_with_the_arguments_and_gets_all_columns(file):
    reward = Reward.load(f"{file}:Made", {"scale": 2})
    assert reward.is_async
    found = reward.call(arguments(scale=3), Logged(2))
    assert asyncio.run(found) == [6.0, 6.0]


@pytest.mark.parametrize(
    ("spec", "args", "reason"),
    [
        ("scaled", {"scal": 1}, "no argument 'scal' .reward.args.scal, .*; did you mean scale"),
        ("scaled", {"completions": 1}, "no argument 'completions'"),
        ("trl", {"level": 1}, "no argument 'level' .reward.args.level, .*; it takes none"),
        ("Made", {}, "needs an argument 'scale': set reward.args.scale=VALUE"),
        ("Made", {"scale": -1}, "could not be made with its args: ValueError.'too small'"),
        ("Still", {}, "makes a Still, which has no __call__"),
    ],
)
def test_arguments_that_a_function_does_not_take_are_refused(file, spec, args, reason):
    with pytest.raises(ConfigError, match=reason):
        Reward.load(f"{file}:{spec}", args)


def test_a_column_needs_a_value_a_sample(file):
    with pytest.raises(ValueError, match=r"log_extra\('one'\) got 1 values for 2 samples"):
        called(f"{file}:bad_extra")


def test_a_metric_of_the_run_is_not_overwritten(file):
    for name in ("mean", "baseline", "reward/by_turn", "turns_alike"):
        with pytest.raises(ValueError, match="the run has a metric of that name already"):
            Logged(1).metric(name, 1.0)
    with pytest.raises(ValueError, match="the run has a metric of that name already"):
        called(f"{file}:taken")


def test_what_is_logged_is_plain():
    logged = Logged(2)
    logged.extra("what", [{"a": (1, 2)}, {1, 2}])
    assert logged.columns == {"what": [{"a": [1, 2]}, "{1, 2}"]}


def test_an_error_in_the_place_of_a_value_is_that_samples_failure():
    assert check([1.0, ValueError("no"), None], 3) == [1.0, "raised ValueError('no')", None]


@pytest.mark.parametrize(
    ("returned", "came"),
    [
        ([1.0], "that is 1 value"),
        ([1.0, 2.0, 3.0], "that is 3 values"),
        ([[1.0, 2.0]], "that is 1 value"),
        ((), "that is 0 values"),
        (1.0, r"one value for all of them .* \[value\] \* len\(completions\)"),
        (np.float64(1.0), "one value for all of them"),
        (np.array(1.0), "one value for all of them"),
        (None, "one value for all of them"),
        ({"a": 1, "b": 2}, "a map, whose keys are not rewards"),
        ({0: 1.0, 1: 0.5}, "a map, whose keys are not rewards"),
        (MappingProxyType({0: 1.0, 1: 0.5}), "a map, whose keys are not rewards"),
        ({1.0, 0.5}, "a set, whose order is not that of the samples"),
        ({1: 0, 2: 0}.keys(), "a set, whose order is not that of the samples"),
        ("10", "that is text"),
        (b"10", "that is text"),
        (bytearray(b"10"), "that is text"),
    ],
)
def test_what_is_not_one_reward_for_each_sample_is_a_failure_of_all(returned, came):
    found = check(returned, 2)
    assert len(found) == 2 and found[0] == found[1]
    assert re.fullmatch(
        rf"returned .* for 2 samples, not one reward for each: .*{came}.*"
        "; return a list of 2, each a finite number or None",
        found[0],
        re.DOTALL,
    )


@pytest.mark.parametrize(
    "returned",
    [(1.0, None), np.array([1.0, np.nan], object), iter([1, None]), {"a": 1.0, "b": None}.values()],
)
def test_anything_that_has_an_order_is_a_list(returned):
    first, second = check(returned, 2)
    assert first == 1.0 and not isinstance(second, float)


def test_what_a_generator_raises_is_raised_and_not_taken_for_no_list():
    def rewards():
        yield 1.0
        raise TypeError("of the user's own")

    with pytest.raises(TypeError, match="of the user's own"):
        check(rewards(), 2)


@pytest.mark.parametrize("value", ["1", math.nan, object()])
def test_a_value_that_is_no_number_is_a_failure(value):
    good, bad = check([1.0, value], 2)
    assert good == 1.0 and bad.endswith("not a finite number in float32")


@pytest.mark.parametrize("value", [[1.0, 2.0], (1.0,), {"score": 1.0}, np.ones(1), np.ones(2)])
def test_several_values_in_the_place_of_one_are_a_failure_that_says_so(value):
    good, bad = check([1.0, value], 2)
    assert good == 1.0 and "not a finite number in float32; a sample has one reward" in bad


def test_what_is_logged_can_be_written_whatever_it_holds():
    """Half of a surrogate pair is a text of Python's and of JSON's, and no UTF-8."""
    logged = Logged(2)
    logged.extra("said \udfff", ["a\ud800", {"b\ud800": ["c\udfff", object, "é😀"]}])
    logged.metric("m\ud800", 1.0)
    assert logged.columns == {"said ?": ["a?", {"b?": ["c?", repr(object), "é😀"]}]}
    assert logged.metrics == {"m?": [1.0]}
