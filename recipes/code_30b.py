"""Qwen3-30B-A3B learns to write Python functions on one node of 8 GPUs of 80 GB: a sample is right
when the tests of its row pass, in a sandbox.

    python recipes/code_30b.py data.path=mine.jsonl
    lora-moe-rl check recipes/code_30b.py                        # calls the reward, before a start
    python recipes/code_30b.py data.path=mine.jsonl algorithm=sdpo algorithm.feedback_key=errors \\
        algorithm.remove_thinking=true model.max_length=16384    # learns from what went wrong

Rows are {"prompt": ..., "tests": ...}; the eight of recipes/data/code_small.jsonl show the form and
are no training set.

GPUs: 4 for the trainer (EP 4), 4 for two engines of TP 2. By the plan a trainer rank holds 30
GiB of 79, an engine rank 71, with room for 96 sequences of 8,192 tokens. Not run yet.

Watch `reward/mean`, and `reward/failed`: a sandbox that cannot run is a failure, never a 0.
"""

import re
import secrets
from collections.abc import Callable
from pathlib import Path

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from lora_moe_rl.planner.hardware import Hardware
from lora_moe_rl.tools.sandbox import Sandbox

SHOWN = 1500  # characters of what a program wrote, the last ones


def passes(completions: list, tests: list[str], log_extra: Callable, **_) -> list[float]:
    """1 where the last block of Python of a completion passes the tests of its row, else 0; logs
    what went wrong."""
    sandbox, pairs = Sandbox(wall_s=10), zip(completions, tests, strict=True)
    errors = [_error(sandbox, one, test) for one, test in pairs]
    log_extra("errors", errors)
    return [float(error is None) for error in errors]


def _error(sandbox: Sandbox, completion: list | str, test: str) -> str | None:
    """What the program wrote when it did not pass."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    blocks = re.findall(r"```(?:python)?\n(.*?)```", text, re.S)
    if not blocks:
        return "There is no block of Python in the answer."
    passed = secrets.token_hex(8)  # which only a program that came to its end prints
    ran = sandbox.run(f"{blocks[-1]}\n{test}\nprint({passed!r})")
    if passed in ran.text:
        return None
    return ran.text[-SHOWN:]


hardware = Hardware(gpus=8, gpu="h100")
DATA = Path(__file__).parent / "data"

config = RunConfig(
    name="code_30b",
    model=ModelConfig(path="Qwen/Qwen3-30B-A3B", max_length=8192),
    adapter=AdapterConfig(rank=32, alpha=64),
    trainer=TrainerConfig(
        steps=200, world_size=4, ep=4, device="cuda", recompute="full", micro_batch_tokens=8192,
        lr=2e-5, warmup_steps=5,
    ),
    rollout=RolloutConfig(
        engines=2, tp=2, ep=True, max_response_tokens=6144, gpu_memory_utilization=0.9
    ),
    algorithm=AlgorithmConfig(prompts_per_step=64, group_size=8),
    data=DataConfig(path=str(DATA / "code_small.jsonl"), chat_template=True),
    reward=RewardConfig(function=f"{__file__}:passes", timeout_s=120),
)  # fmt: skip

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
