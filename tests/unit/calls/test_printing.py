"""What a user's function prints is not in what the run prints."""

import asyncio

from lora_moe_rl.data.samples import Prompt
from tests.helpers.reward_calls import runner_of, sample_of


def test_what_a_reward_prints_stands_on_stderr(tmp_path, capfd):
    """`train --json` prints records on stdout, and a program reads them."""
    file = tmp_path / "printing.py"
    file.write_text("def reward(completions):\n    print('seen', flush=True)\n    return [1.0]\n")
    with runner_of(f"{file}:reward", timeout_s=60) as runner:
        scores = asyncio.run(runner.score(Prompt(0, "a", [1], {}), [sample_of(1, "x")]))
    assert scores.rewards.tolist() == [1.0]
    printed = capfd.readouterr()
    assert printed.out == "" and "seen" in printed.err
