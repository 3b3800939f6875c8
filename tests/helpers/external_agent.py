"""An agent that knows OpenAI's protocol and the standard library alone. Its argument says what it
does: ask; ask and set a reward, for as many trajectories as there are; ask twice the same (forks);
fail; complain a lot and wait; leave a process behind; hang; or nothing."""

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


def main(what: str) -> None:
    key = os.environ["OPENAI_API_KEY"]
    if what == "nothing":
        return
    said = ask(key)
    if what == "forks":
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
    while what == "rewards":
        call("/reward", key, {"reward": len(said) / 4})
        key = call("/next", key, {})["api_key"]
        said = ask(key)


if __name__ == "__main__":
    main(sys.argv[1])
