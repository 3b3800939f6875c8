"""Python code, run in a sandbox with its usual limits."""

from __future__ import annotations

from functools import cache

from lora_moe_rl.tools.sandbox import Sandbox


def python(code: str) -> str:
    """
    Runs Python code and returns what it prints.

    Args:
        code: The code, for example "print(3 * 7)". Nothing is kept from one call to the next.

    Returns:
        What the code printed, and how it ended if not by itself.
    """
    return _usual().run(code).text


@cache
def _usual() -> Sandbox:
    return Sandbox()
