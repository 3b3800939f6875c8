"""verl's reward functions, `compute_score(data_source, solution_str, ground_truth, extra_info)`,
called as they are: once a sample, with those of the four keywords that they take. They return a
number, or a dict with `score`, whose other values become columns of samples.jsonl. Those of its
batch manager, with the plural of each parameter, are called once a prompt, with lists.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from lora_moe_rl.rewards.builtin import completion_text

MARKS = {"solution_str", "ground_truth"}  # a function that has both parameters is verl's
BATCH_MARKS = {f"{name}s" for name in MARKS}


def is_verl_style(function: Callable) -> bool:
    names = inspect.signature(function).parameters.keys()
    return names >= MARKS or names >= BATCH_MARKS


def is_of_batches(function: Callable) -> bool:
    return inspect.signature(function).parameters.keys() >= BATCH_MARKS


def by_prompt(function: Callable) -> Callable:
    """A plain function of verl as one that is called once a prompt, as TRL does it. A sample whose
    call raises has the error in the place of its reward. Raises ValueError without an answer."""

    takes = _taken_by(function)
    if is_of_batches(function):

        def of_batch(completions: list, log_extra: Callable, **columns) -> Any:
            return _scores(function(**takes(_lists(completions, columns))), log_extra)

        return of_batch

    def reward(completions: list, log_extra: Callable, **columns) -> list[Any]:
        returned = []
        for keywords in _keywords(completions, columns):
            try:
                returned.append(function(**takes(keywords)))
            except BaseException as error:  # as the worker does it for a whole prompt
                returned.append(error)
        return _scores(returned, log_extra)

    return reward


def by_prompt_async(function: Callable) -> Callable:
    """The same of an async function, whose samples are scored together."""

    takes = _taken_by(function)
    if is_of_batches(function):

        async def of_batch(completions: list, log_extra: Callable, **columns) -> Any:
            return _scores(await function(**takes(_lists(completions, columns))), log_extra)

        return of_batch

    async def reward(completions: list, log_extra: Callable, **columns) -> list[Any]:
        calls = [function(**takes(keywords)) for keywords in _keywords(completions, columns)]
        return _scores(await asyncio.gather(*calls, return_exceptions=True), log_extra)

    return reward


def _taken_by(function: Callable) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Leaves of keywords those that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return lambda keywords: keywords
    return lambda keywords: {name: v for name, v in keywords.items() if name in parameters}


def _keywords(completions: list, columns: dict[str, list]) -> list[dict[str, Any]]:
    """The keywords of one call for each sample. A row without data_source or extra_info has '' and
    {} for them."""
    if "answer" not in columns:
        raise ValueError("ground_truth is the answer, and the row has none (data.answer_key)")
    nothing: list[Any] = [None] * len(completions)
    sources, infos = columns.get("data_source", nothing), columns.get("extra_info", nothing)
    return [
        {
            "data_source": source or "",
            "solution_str": completion_text(completion),
            "ground_truth": answer,
            "extra_info": dict(info or {}),
        }
        for completion, source, answer, info in zip(
            completions, sources, columns["answer"], infos, strict=True
        )
    ]


def _lists(completions: list, columns: dict[str, list]) -> dict[str, list]:
    """The keywords of one call for all samples."""
    ones = _keywords(completions, columns)
    return {f"{name}s": [one[name] for one in ones] for name in ones[0]}


def _scores(returned: Any, log_extra: Callable) -> Any:
    """The scores; what else the dicts among `returned` hold is logged, None for who has it not.
    What is no list is left for the check of what a function returned."""
    if not isinstance(returned, list):
        return returned
    dicts = [one if isinstance(one, dict) else {} for one in returned]
    for name in dict.fromkeys(key for one in dicts for key in one if key != "score"):
        log_extra(name, [one.get(name) for one in dicts])
    return [_score(one) for one in returned]


def _score(one: Any) -> Any:
    if not isinstance(one, dict):
        return one
    return one["score"] if "score" in one else ValueError(f"the dict {one!r} has no 'score'")
