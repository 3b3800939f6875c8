"""The reward of reasoning_gym's tasks: what the library itself gives an answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from lora_moe_rl.data.generators import load_reasoning_gym
from lora_moe_rl.rewards.builtin import completion_text

BEGIN, END = "<answer>", "</answer>"


def reasoning_gym(prompts: list, completions: list, answer: list, metadata: list) -> list[float]:
    """0 to 1, by the task's own rules, for rows of `lora_moe_rl.data.generators:reasoning_gym`: of
    what stands in the last <answer></answer>, or of the whole completion if there is none."""
    scores = []
    for prompt, completion, right, about in zip(
        prompts, completions, answer, metadata, strict=True
    ):
        entry = {"question": prompt, "answer": right, "metadata": about}
        given = _final(completion_text(completion))
        scores.append(float(_score_of(about["source_dataset"])(given, entry)))
    return scores


@cache
def _score_of(task: str) -> Callable[[str, dict], float]:
    return load_reasoning_gym().get_score_answer_fn(task)


def _final(text: str) -> str:
    _, begun, rest = text.rpartition(BEGIN)
    return (rest.partition(END)[0] if begun else text).strip()
