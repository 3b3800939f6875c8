"""Tools of the tests, good and evil."""

import asyncio
import os
import subprocess
import sys
import time


def add(a: int, b: int = 1) -> int:
    """
    Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


async def slowly(text: str) -> str:
    """
    Says it again.

    Args:
        text: What to say.
    """
    return text * 3


LOOPS: list = []


async def faithful(text: str) -> str:
    """
    Says it again, as a client does that keeps to the loop of its first call.

    Args:
        text: What to say.
    """
    LOOPS.append(asyncio.get_running_loop())
    if len(set(LOOPS)) > 1:
        raise RuntimeError("Event loop is closed")
    return text


def evil(how: str) -> str:
    """
    Does no good.

    Args:
        how: In which way.
    """
    if how == "raise":
        raise RuntimeError("no such luck")
    if how == "hang":
        time.sleep(600)
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit("gone")
    if how == "print":
        for _ in range(1024):
            print("x" * (1 << 20))
        return "printed"
    if how == "huge":
        return "x" * (1 << 26)
    if how == "fork":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
    if how == "none":
        return None
    if how == "object":
        return object()
    if how == "bytes":
        return b"123"
    return "\ud800"
