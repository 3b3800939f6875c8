"""Who samples for an endpoint, without a model: says texts as their bytes, with the routes of one
uninterrupted request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import openai
from written_policy import WrittenPolicy

from lora_moe_rl.endpoint.admission import Admission
from lora_moe_rl.endpoint.app import Endpoint
from lora_moe_rl.endpoint.listening import Listening
from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.endpoint.rendering import Chats
from lora_moe_rl.tiny.tokenizer import make_tokenizer, token_id

EOS = token_id("<eos>")
TOKENIZER = make_tokenizer()
_clients: list[openai.AsyncOpenAI] = []


class Speaker(WrittenPolicy):
    """Says texts in turn, each as its bytes and the end token; one that ends in ... is cut off.
    `wait`: set before it answers. Says the last one for ever."""

    def __init__(self, *texts: str):
        super().__init__()
        self.texts, self.wait, self.cancelled = list(texts), asyncio.Event(), 0
        self.wait.set()
        self.fails: Exception | None = None

    async def sample(self, token_ids, n, turn=None):
        assert turn is not None
        number = min(len(self.asked), len(self.texts) - 1)
        try:
            await self.wait.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails is not None:
            raise self.fails
        text = self.texts[number]
        said = [*text.encode(), *([] if text.endswith("...") else [EOS])]
        self.turns = [said] * (turn.number + 1)
        (sample,), routes = await super().sample(token_ids, n, turn)
        ids = sample.response_ids.tolist()
        object.__setattr__(sample, "text", bytes(t for t in ids if t < 252).decode())
        object.__setattr__(sample, "finish_reason", "stop" if ids[-1] == EOS else "length")
        return [sample], routes


class Spoken:
    """A source of one model, `policy`, with one speaker."""

    def __init__(self, speaker: Speaker, max_length: int = 400, max_response: int = 300):
        self.speaker, self.max_length, self.max_response = speaker, max_length, max_response
        self.asked, self.failures = [], []

    def failed(self, error) -> None:
        self.failures.append(error)

    def models(self) -> list[str]:
        return ["policy"]

    def policy(self, asked):
        self.asked.append(asked)
        if asked.model != "policy":
            raise Refused(404, "model_not_found", f"there is no model {asked.model}")
        return "policy", self.speaker


@asynccontextmanager
async def listening(
    sessions, tokenizer=TOKENIZER, running=64, waiting=64, more: Sequence = (), calls="json"
) -> AsyncIterator[tuple[Endpoint, Listening]]:
    """An endpoint that answers on loopback."""
    endpoint = Endpoint(sessions, Chats(tokenizer, calls), Admission(running, waiting), more)
    at = Listening("127.0.0.1", 0)
    serving = asyncio.create_task(at.serve(endpoint.app()))
    await at.started()
    try:
        yield endpoint, at
    finally:
        while _clients:
            await _clients.pop().close()
        at.stop()
        await serving
        at.close()


def client(at: Listening, key: str, retries: int = 0, path: str = "/v1") -> openai.AsyncOpenAI:
    made = openai.AsyncOpenAI(base_url=at.root + path, api_key=key, max_retries=retries)
    _clients.append(made)
    return made
