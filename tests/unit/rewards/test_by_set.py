"""Each data set is scored by its own function."""

import asyncio

import numpy as np
import pytest

from lora_moe_rl.config import RewardConfig, RewardFunction
from lora_moe_rl.data.samples import Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.by_set import RewardsBySet
from lora_moe_rl.rewards.runner import RewardRunner
from tests.helpers.reward_calls import sample_of

pytestmark = pytest.mark.seconds


def test_a_prompt_is_scored_by_the_function_of_its_set(tmp_path):
    (tmp_path / "two.py").write_text(
        "def one(completions, **_): return [1.0] * len(completions)\n"
        "def two(completions, **_): return [2.0] * len(completions)\n"
    )
    one, two = (f"{tmp_path}/two.py:{name}" for name in ("one", "two"))
    functions = {
        "a": [RewardFunction("reward.function", one)],
        "b": [RewardFunction("data.sets.b.reward", two)],
        "c": [RewardFunction("reward.function", one)],
    }
    sample = Sample((Segment.given("user", [1]), Segment.sampled([2], np.zeros(1), 0)), "stop", "x")
    with RewardsBySet(functions, RewardConfig(timeout_s=20), max_steps=40) as rewards:
        assert rewards.of("a") == rewards.of("c")
        for name, value in (("a", 1.0), ("b", 2.0), ("c", 1.0)):
            prompt = Prompt(0, "p", [1], {}, name)
            found, failures, _ = asyncio.run(rewards.score(prompt, [sample]))
            assert list(found) == [value] and not failures
        processes = [worker.process for one in "ab" for worker in rewards.of(one)[0].pool.workers]
        assert len(processes) == 4
    assert all(process.poll() is not None for process in processes)


def test_several_functions_score_a_prompt_together_and_one_of_other_arguments_is_another(tmp_path):
    (tmp_path / "scaled.py").write_text(
        "def scaled(completions, trainer_state, log_metric, scale=1.0, **_):\n"
        "    log_metric('steps', trainer_state.global_step / trainer_state.max_steps)\n"
        "    return [scale * len(one) for one in completions]\n"
    )
    spec = f"{tmp_path}/scaled.py:scaled"
    one = RewardFunction("reward.functions.one.function", spec, {}, 1.0, "one")
    ten = RewardFunction("reward.functions.ten.function", spec, {"scale": 10.0}, 0.5, "ten")
    samples = [sample_of(1, "x", version=9), sample_of(2, "xyz", version=10)]
    with RewardsBySet(
        {"a": [one, ten], "b": [one]}, RewardConfig(timeout_s=20), max_steps=40
    ) as rewards:
        assert len({*rewards.of("a"), *rewards.of("b")}) == 2
        found = asyncio.run(rewards.score(Prompt(0, "p", [1], {}, "a"), samples))
        assert found.rewards.tolist() == [1 + 5, 3 + 15] and not found.failures
        assert found.details.metrics == {"one/steps": [0.25], "ten/steps": [0.25]}
        found = asyncio.run(rewards.score(Prompt(0, "p", [1], {}, "b"), samples))
        assert found.rewards.tolist() == [1, 3] and [*found.details.by_function] == ["one"]


def test_of_two_functions_the_one_that_judges_the_group_as_a_whole_is_named(tmp_path):
    """A number for all samples together is no reward of any, and the sum has none either."""
    (tmp_path / "mixed.py").write_text(
        "def each(completions): return [1.0] * len(completions)\n"
        "def group(completions): return 0.5\n"
    )
    both = [
        RewardFunction(f"reward.functions.{n}.function", f"{tmp_path}/mixed.py:{n}", {}, 1.0, n)
        for n in ("each", "group")
    ]
    samples = [sample_of(1, "x"), sample_of(2, "xyz")]
    with RewardsBySet({"": both}, RewardConfig(timeout_s=20), max_steps=40) as rewards:
        found = asyncio.run(rewards.score(Prompt(7, "p", [1], {}), samples))
    assert np.isnan(found.rewards).all()
    said = f"prompt 7: {tmp_path}/mixed.py:group returned 0.5 for 2 samples, not one reward for"
    assert len(found.failures) == 2 and all(one.startswith(said) for one in found.failures)
    by_name = found.details.by_function
    assert by_name["each"].rewards.tolist() == [1, 1] and by_name["each"].num_failed == 0
    assert by_name["group"].num_failed == 2


def test_workers_are_refused_where_every_function_is_async(tmp_path):
    (tmp_path / "both.py").write_text(
        "async def waits(completions): return [1.0] * len(completions)\n"
        "def works(completions): return [1.0] * len(completions)\n"
    )
    waits, works = (
        RewardFunction(f"reward.functions.{n}.function", f"{tmp_path}/both.py:{n}", {}, 1.0, n)
        for n in ("waits", "works")
    )
    settings = RewardConfig(timeout_s=20, workers=3)
    with RewardsBySet({"": [waits, works]}, settings, max_steps=40) as rewards:
        assert [len(one.pool.workers) for one in rewards.of("")] == [1, 3]
    with pytest.raises(ConfigError, match=r"reward\.workers=3 has no effect with .*both.py:waits"):
        RewardsBySet({"": [waits]}, settings, max_steps=40)


def test_a_function_that_is_absent_ends_the_others(monkeypatch):
    ended = []
    close = RewardRunner.close
    monkeypatch.setattr(RewardRunner, "close", lambda self: (ended.append(self), close(self)))
    functions = {
        "a": [RewardFunction("reward.function", "lora_moe_rl.rewards:exact_match")],
        "b": [RewardFunction("data.sets.b.reward", "lora_moe_rl.rewards:exact_mtch")],
    }
    with pytest.raises(ConfigError, match="exact_mtch.*did you mean exact_match"):
        RewardsBySet(functions, RewardConfig(timeout_s=20), max_steps=40)
    assert [runner.function for runner in ended] == ["lora_moe_rl.rewards:exact_match"]
