"""An OpenAI-compatible server on loopback, which judges, or fails as the question tells it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from json_server import JsonHandler, JsonServer, serving


class JudgeServer(JsonServer):
    """What a question holds says what is answered: `hang`, `500`, `busy twice` (429, then an
    answer), `no json`, `no choices`, `no text`, `no number`, `eleven`, `half`
    (of an emoji); else a score of 7. `asked`:
    the questions with their headers; `at_once`: the most requests at a time, each of which takes
    `pause_s`."""

    def __init__(self, pause_s: float = 0.0):
        super().__init__(Handler)
        self.pause_s, self.asked, self.headers = pause_s, [], []
        self.now = self.at_once = self.busy = 0


class Handler(JsonHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = self.body()
        question, server = body["messages"][0]["content"], self.server
        with server.lock:
            server.asked.append(body)
            server.headers.append({key.lower(): value for key, value in self.headers.items()})
            server.now += 1
            server.at_once = max(server.at_once, server.now)
        time.sleep(server.pause_s)
        with server.lock:
            server.now -= 1
        self._answer(question)

    def _answer(self, question: str) -> None:
        if "hang" in question:
            self.server.hang()
        elif "500" in question:
            self.send(500, {"error": {"message": "out of memory"}})
        elif "busy twice" in question and self.server.busy < 2:
            self.server.busy += 1
            self.send(429, {"error": {"message": "busy"}})
        elif "no json" in question:
            self.send(200, "<html>not what you want")
        elif "no choices" in question:
            self.send(200, {"object": "error", "message": "no such thing"})
        elif "no text" in question:
            self.send(200, {"choices": [{}]})
        else:
            said = "Well. Score: 3? No.\nScore: 7"
            said = "I cannot say." if "no number" in question else said
            said = "Score: 11" if "eleven" in question else said
            said = "\ud83d. Score: 7" if "half" in question else said
            message = {"role": "assistant", "content": said}
            self.send(200, {"choices": [{"index": 0, "message": message}]})


@contextmanager
def judge_server(pause_s: float = 0.0) -> Iterator[JudgeServer]:
    with serving(JudgeServer(pause_s)) as server:
        yield server
