"""recipes/agents/adds_twice.py, which also asks the frozen base and versions of the policy, as a
judge would, where the file is named (ANSWERS) in which it notes what they say, a line each."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes/agents"))
import adds_twice


def main() -> None:
    client = openai.OpenAI()
    while True:
        task: Any = client.get("/task", cast_to=object)
        reward = adds_twice.work(client, task)
        if "ANSWERS" in os.environ:
            ask_others(client, task["prompt"])
        client.post("/reward", body={"reward": reward}, cast_to=object)
        following: Any = client.post("/next", body={}, cast_to=object)
        client = client.with_options(api_key=following["api_key"])


def ask_others(client: openai.OpenAI, messages: list) -> None:
    parts = [message["content"] for message in messages]
    said, tokens = ask(client, "base", messages, parts)
    more = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "+1="}]
    ask(client, "base", more, [*parts, tokens, "+1="])
    for version in served(client, messages):
        ask(client, f"policy@{version}", messages, parts)


def served(client: openai.OpenAI, messages: list) -> list[int]:
    """Versions, as one that there is not tells them; one that is gone tells the same."""
    found = [named_instead(client, f"policy@{version}", messages) for version in (1_000_000, 0)]
    if found[1] is not None:
        assert found[0] == found[1] and 0 not in found[1]
        note({"model": "policy@0", "instead": found[1]})
    assert found[0]
    return found[0]


def named_instead(client: openai.OpenAI, model: str, messages: list) -> list[int] | None:
    try:
        ask(client, model, messages, [])
    except openai.NotFoundError as error:
        there = error.message.partition("there are")[2]
        assert "policy," in there and "base" in there
        return [int(number) for number in re.findall(r"policy@(\d+)", there)]
    return None


def ask(client: openai.OpenAI, model: str, messages: list, parts: list) -> tuple[str, list[int]]:
    """`parts`: what it is asked after, as texts and tokens."""
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=4, logprobs=True
    )
    (choice,) = answer.choices
    content = choice.logprobs.content
    tokens = [int(one.token.partition(":")[2]) for one in content]
    logprobs = [one.logprob for one in content]
    note({"model": answer.model, "parts": parts, "tokens": tokens, "logprobs": logprobs})
    return choice.message.content or "", tokens


def note(line: dict) -> None:
    with open(os.environ["ANSWERS"], "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
