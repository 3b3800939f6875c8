"""Arguments of reward functions: what a process can be given, and what a function takes."""

import asyncio

import numpy as np
import pytest

from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import ConfigError
from tests.helpers.reward_calls import runner_of, sample_of


def test_arguments_that_no_process_can_be_given_are_refused():
    with (
        pytest.raises(ConfigError, match="its args are 200,011 bytes.* put what is long into a fi"),
        runner_of("lora_moe_rl.rewards:Judge", 10, url="x" * 200_000),
    ):
        pass


def test_keywords_of_a_verl_style_function_are_its_reward_kwargs(tmp_path):
    """Of a TRL-style one they are columns, and an argument there would hide a slip."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def verls(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return kwargs['scale'] * float(solution_str == ground_truth)\n"
        "def trls(completions, answer, **kwargs):\n"
        "    return [1.0] * len(completions)\n"
    )
    prompt = Prompt(3, "p", [1], {"answer": "7"})
    with runner_of(f"{file}:verls", 30, scale=2) as runner:
        scores = asyncio.run(runner.score(prompt, [sample_of(1, "7"), sample_of(1, "8")]))
    np.testing.assert_array_equal(scores.rewards, [2, 0])
    with (
        pytest.raises(
            ConfigError, match=r"no argument 'scale' .*it takes answer, and \*\*: columns"
        ),
        runner_of(f"{file}:trls", 30, scale=2),
    ):
        pass
