"""An agent of OpenAI's Agents SDK (the package openai-agents), as it is written for any model: it
has a sum added, and a tool asks for seven more of what was said.

It knows the run by OPENAI_BASE_URL and OPENAI_API_KEY alone, and runs in an environment of its own
(`make agents-openai`). One trajectory is one process.
"""

from __future__ import annotations

from typing import Any

import openai
from adds_twice import score
from agents import (
    Agent,
    ModelSettings,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

said: list[int] = []


@function_tool
def seven_more(number: int) -> str:
    """
    Asks for a number and seven.

    Args:
        number: A whole number.
    """
    said.append(number)
    return f"{number}+7="


def enough(context: Any, results: list[Any]) -> ToolsToFinalOutputResult:
    """The agent ends when the tool has been called twice."""
    return ToolsToFinalOutputResult(is_final_output=len(said) > 1, final_output=said)


def main() -> None:
    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    client = openai.OpenAI()
    task: Any = client.get("/task", cast_to=object)
    agent = Agent(
        name="adder",
        model="policy",
        tools=[seven_more],
        tool_use_behavior=enough,
        model_settings=ModelSettings(max_tokens=5),
    )
    Runner.run_sync(agent, task["prompt"])
    client.post("/reward", body={"reward": reward(task["row"]["answer"])}, cast_to=object)


def reward(answer: str) -> float:
    """The mean of both turns: of the sum, and of what is seven more than the sum that was said."""
    first, second = [*map(str, said), "", ""][:2]
    wanted = str(said[0] + 7) if said else "no number was said"
    return (score(first, answer) + score(second, wanted)) / 2


if __name__ == "__main__":
    main()
