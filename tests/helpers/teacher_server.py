"""A teacher on loopback that speaks what vLLM's server does: /v1/models, and /v1/completions with
token ids, of whose prompt it gives the logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from json_server import JsonHandler, JsonServer, serving

MODEL = "sage"


class TeacherServer(JsonServer):
    """`score(ids)` are the logprobs of all but the first, `decode(id)` is what an id stands for,
    `likeliest(ids)` are the likeliest tokens in the place of each but the first.

    fault: what is wrong with its answers: `shifted` (each logprob is that of the token before),
    `other ids`, `no field`, `infinite`, `500`, `hang`, `mute` (ids are not decoded); None: nothing.
    Of every other request alone when `seldom`. `failing`: the one prompt that it fails. `asked`:
    the bodies of the requests.
    """

    def __init__(self, score, decode, most_tokens: int, likeliest):
        super().__init__(Handler)
        self.score, self.decode, self.most_tokens = score, decode, most_tokens
        self.likeliest = likeliest
        self.fault: str | None = None
        self.seldom = False
        self.failing: list[int] = []
        self.asked: list[dict] = []

    def steps(self, ids: list[int], fault: str | None, top_k: int) -> list[dict | None] | None:
        """The field prompt_logprobs."""
        values = [float(value) for value in self.score(ids)]
        keys = ids[1:]
        if fault == "shifted":
            keys = ids[:-1]
        elif fault == "other ids":
            keys = [i + 1 for i in keys]
        elif fault == "infinite":
            values[-1] = -9999.0
        texts = [None if fault == "mute" else self.decode(i) for i in keys]
        said = [
            {str(i): {"logprob": value, "rank": 1, "decoded_token": text}}
            for i, value, text in zip(keys, values, texts, strict=True)
        ]
        if top_k:
            for step, others in zip(said, self.likeliest(ids), strict=True):
                for rank, (i, value) in enumerate(list(others.items())[:top_k], 1):
                    one = {"logprob": value, "rank": rank, "decoded_token": self.decode(i)}
                    step.setdefault(str(i), one)
        return None if fault == "no field" else [None, *said]


class Handler(JsonHandler):
    server: TeacherServer

    def do_GET(self) -> None:
        card = {"id": MODEL, "object": "model", "max_model_len": self.server.most_tokens}
        self.send(200, {"object": "list", "data": [card]})

    def do_POST(self) -> None:
        body = self.body()
        server = self.server
        with server.lock:
            server.asked.append(body)
            spared = server.seldom and len(server.asked) % 2
            fault = None if spared else server.fault
            fault = "500" if body["prompt"] == server.failing else fault
            steps = server.steps(body["prompt"], fault, body["prompt_logprobs"])
        if fault == "hang":
            server.hang()
        elif fault == "500":
            self.send(500, {"error": {"message": "out of memory"}})
        else:
            choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": steps}
            self.send(200, {"id": "1", "object": "text_completion", "choices": [choice]})


def made_up(ids: Sequence[int]) -> np.ndarray:
    """Logprobs that differ by token and place."""
    return np.array([-0.25 - 0.5 * place - 0.01 * i for place, i in enumerate(ids)][1:])


@contextmanager
def teacher_server(
    score: Callable[[list[int]], Sequence[float] | np.ndarray] = made_up,
    decode: Callable[[int], str] = chr,
    most_tokens: int = 4096,
    likeliest: Callable[[list[int]], Sequence[dict[int, float]]] | None = None,
) -> Iterator[TeacherServer]:
    with serving(TeacherServer(score, decode, most_tokens, likeliest)) as server:
        yield server
