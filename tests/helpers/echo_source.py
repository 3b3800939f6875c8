"""A policy that says what it is asked, backwards, and one request to an app without a socket."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import numpy as np
from spoken_source import EOS

from lora_moe_rl.data.samples import Sample, Segment


class Echo:
    """Source and policy at once. `answered`: how often each text was; `most`: at the same time.
    `go`: set before it answers."""

    max_length = max_response = 400

    def __init__(self):
        self.answered: Counter[str] = Counter()
        self.now = self.most = 0
        self.go = asyncio.Event()
        self.go.set()

    def models(self) -> list[str]:
        return ["policy"]

    def failed(self, error: Exception) -> None:
        raise error

    def policy(self, asked: Any) -> tuple[str, Echo]:
        return "policy", self

    async def sample(self, token_ids, n, turn=None):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.go.wait()
        finally:
            self.now -= 1
        text = bytes(token_ids).decode()
        self.answered[text] += 1
        said = [*reversed(token_ids), EOS]
        segment = Segment.sampled(said, np.zeros(len(said)), 0)
        return [Sample((Segment.given("user", token_ids), segment), "stop", text[::-1])], None


async def ask(app: Any, body: dict | bytes, ends: bool = False) -> tuple[int, dict, Any]:
    """Status, headers and JSON of POST /v1/completions. `ends`: its client goes after the body, or
    within it when that is not whole JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    whole = not isinstance(body, bytes)
    said = [{"type": "http.request", "body": content, "more_body": not whole}]
    if ends:
        said.append({"type": "http.disconnect"})
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "root_path": "",
        "headers": [], "query_string": b"", "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    sent: list[dict] = []

    async def receive() -> dict:
        if not said:
            await asyncio.Event().wait()  # for ever: it stays
        return said.pop(0)

    async def send(message: dict) -> None:
        sent.append(message)

    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], headers, json.loads(content) if content else None
