"""An agent that knows OpenAI's client and nothing else: it has a sum added, and 7 to that.

The run starts it with OPENAI_BASE_URL and OPENAI_API_KEY (recipes/tiny_agent.py). An agent with an
end of its own would end here; this one asks for the next trajectory, so that it starts but once.
"""

from __future__ import annotations

from typing import Any

import openai


def main() -> None:
    client = openai.OpenAI()
    while True:
        task: Any = client.get("/task", cast_to=object)
        client.post("/reward", body={"reward": work(client, task)}, cast_to=object)
        following: Any = client.post("/next", body={}, cast_to=object)
        client = client.with_options(api_key=following["api_key"])


def work(client: openai.OpenAI, task: dict) -> float:
    """The mean of both turns: of the sum, and of what is seven more than the sum that was said."""
    messages = list(task["prompt"])
    first = ask(client, messages)
    right = score(first, task["row"]["answer"])
    if not first.isdecimal():
        return right / 2
    messages.append({"role": "user", "content": f"{first}+7="})
    return (right + score(ask(client, messages), str(int(first) + 7))) / 2


def ask(client: openai.OpenAI, messages: list) -> str:
    """Also puts the answer behind the messages."""
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
    said = answer.choices[0].message
    messages.append({"role": "assistant", "content": said.content})
    return said.content or ""


def score(text: str, expected: str) -> float:
    """1 for the right digits, otherwise up to a half: the share of digits that are in place."""
    same = sum(one == other for one, other in zip(text, expected, strict=False))
    return 1.0 if text == expected else 0.5 * same / max(len(text), len(expected))


if __name__ == "__main__":
    main()
