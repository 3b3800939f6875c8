"""Each data set is scored by its own function."""

import asyncio

import numpy as np
import pytest

from lora_moe_rl.data.samples import Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.by_set import RewardsBySet
from lora_moe_rl.rewards.runner import RewardRunner

pytestmark = pytest.mark.seconds


def test_a_prompt_is_scored_by_the_function_of_its_set(tmp_path):
    (tmp_path / "two.py").write_text(
        "def one(completions, **_): return [1.0] * len(completions)\n"
        "def two(completions, **_): return [2.0] * len(completions)\n"
    )
    one, two = (f"{tmp_path}/two.py:{name}" for name in ("one", "two"))
    functions = {"a": ("reward.function", one), "b": ("data.sets.b.reward", two)}
    functions["c"] = "reward.function", one
    sample = Sample((Segment.given("user", [1]), Segment.sampled([2], np.zeros(1), 0)), "stop", "x")
    with RewardsBySet(functions, timeout_s=20) as rewards:
        assert rewards.of("a") is rewards.of("c")
        for name, value in (("a", 1.0), ("b", 2.0), ("c", 1.0)):
            prompt = Prompt(0, "p", [1], {}, name)
            found, failures = asyncio.run(rewards.score(prompt, [sample]))
            assert list(found) == [value] and not failures
        processes = [worker.process for one in "ab" for worker in rewards.of(one)._workers]
        assert len(processes) == 4
    assert all(process.poll() is not None for process in processes)


def test_a_function_that_is_absent_ends_the_others(monkeypatch):
    ended = []
    close = RewardRunner.close
    monkeypatch.setattr(RewardRunner, "close", lambda self: (ended.append(self), close(self)))
    functions = {"a": ("reward.function", "lora_moe_rl.rewards:exact_match")}
    functions["b"] = "data.sets.b.reward", "lora_moe_rl.rewards:exact_mtch"
    with pytest.raises(ConfigError, match="exact_mtch.*did you mean exact_match"):
        RewardsBySet(functions, timeout_s=20)
    assert [runner.function for runner in ended] == ["lora_moe_rl.rewards:exact_match"]
