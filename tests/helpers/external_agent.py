"""An agent that knows OpenAI's protocol and the standard library alone. Its argument says what it
does: ask; ask and set a reward, for as many trajectories as there are, or once those of two turns;
ask twice the same (forks); ask for more than there is room for, and fail at it, or go on; fail;
complain a lot and wait; leave a process behind; hang; nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request


def call(path: str, key: str, body: dict | None = None) -> dict:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ask(key: str) -> str:
    prompt = call("/task", key)["prompt"]
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "policy", "messages": messages}
    return call("/chat/completions", key, body)["choices"][0]["message"]["content"]


def by_turn(key: str) -> None:
    """A second turn, and rewards and states of turns: some that cannot be, then those that are."""
    messages = [{"role": "user", "content": call("/task", key)["prompt"]}]
    messages.append({"role": "assistant", "content": "5"})
    messages.append({"role": "user", "content": "Sure?"})
    call("/chat/completions", key, {"model": "policy", "messages": messages})
    for wrong in (
        {"turns": [1]}, {"turns": [0.5, 0.25]}, {"turns": [0.5, "0.5"]}, {"turns": None},
        {"turns": [1, float("nan")]}, {"states": ["a"]}, {"states": ["a", 1]}, {"states": None},
        {"state": "a"},
    ):  # fmt: skip
        try:
            call("/reward", key, {"reward": 1, **wrong})
        except urllib.error.HTTPError as error:
            assert error.code == 400, error
        else:
            raise AssertionError(wrong)
    call("/reward", key, {"reward": 1, "turns": [0.25, 0.75], "states": [None, "sure? \ud800"]})


def main(what: str) -> None:
    key = os.environ["OPENAI_API_KEY"]
    if what == "nothing":
        return
    said = ask(key)
    if what == "forks":
        ask(key)
    if what in ("outgrows", "recovers"):
        long = [{"role": "user", "content": "x" * 300}]
        try:
            call("/chat/completions", key, {"model": "policy", "messages": long})
        except urllib.error.HTTPError as error:
            assert error.code == 400 and b"context_length_exceeded" in error.read()
            if what == "outgrows":
                raise SystemExit("there was no room") from error
        ask(key)
    if what == "complains":
        sys.stderr.write("x" * (1 << 26))
        call("/next", key, {})
    if what == "leaves":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    if what == "fail":
        sys.stderr.write("x" * (1 << 20) + "\n")
        raise SystemExit("the browser has crashed")
    if what == "hang":
        time.sleep(600)
    if what == "turns":
        by_turn(key)
        return
    while what == "rewards":
        call("/reward", key, {"reward": len(said) / 4})
        key = call("/next", key, {})["api_key"]
        said = ask(key)


if __name__ == "__main__":
    main(sys.argv[1])
