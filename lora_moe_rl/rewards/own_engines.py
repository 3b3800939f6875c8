"""The frozen base on the run's own engines, as an OpenAI-compatible server on loopback.

A reward function in a process of its own asks for http://127.0.0.1:PORT/v1/chat/completions; what
answers is the model that is trained, without its adapters:

    reward process ──HTTP──> a thread here ──> the run's event loop ──> an engine, adapters off

The address is there before anything starts, and answers 503 until `connect` has been called.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lora_moe_rl.config.reward import BASE
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.models.tokenizer import foreign_ids
from lora_moe_rl.ports import Written
from lora_moe_rl.rewards.chat_request import MOST_BYTES, ChatRequest, Refused

PATH = "/v1/chat/completions"
ANSWER_S = 3600.0  # who asks has a patience of its own
LOOK_S = 1.0  # between two looks whether they still wait
# (token ids, most tokens, temperature, seed)
Complete = Callable[[list[int], int, float, int], Awaitable[Written]]


class OwnEngines:
    """The server. It listens from when it is made, until `close`."""

    def __init__(self):
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._complete: Complete | None = None
        thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)
        thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def connect(self, complete: Complete, tokenizer: Any, longest: int) -> None:
        """From now on `complete` answers. Called in the event loop that it runs in. `longest`:
        tokens of a question and its answer."""
        self._loop = asyncio.get_running_loop()
        self._tokenizer, self._longest = tokenizer, longest
        self._complete = complete

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, data: bytes, asker: socket.socket | None = None) -> dict[str, Any]:
        """A chat completion, as OpenAI's API writes it. Called in any thread. Nothing more is
        sampled once `asker` has gone. Raises Refused."""
        if self._complete is None:
            raise Refused(503, "the run's engines have not started yet")
        token_ids, most, temperature, seed = self.asked(data)
        call = self._complete(token_ids, most, temperature, seed)
        waiting: Future[Written] = asyncio.run_coroutine_threadsafe(_awaited(call), self._loop)
        try:
            written = _while_there(waiting, asker)
        except LoraMoeRlError as error:  # an engine that died comes back
            raise Refused(503, str(error)) from error
        message = {"role": "assistant", "content": written.text}
        choice = {"index": 0, "message": message, "finish_reason": written.finish_reason}
        used = {"prompt_tokens": len(token_ids), "completion_tokens": written.num_tokens}
        used["total_tokens"] = sum(used.values())
        head = {"id": "base", "object": "chat.completion", "created": 0, "model": BASE}
        return {**head, "choices": [choice], "usage": used}

    def asked(self, data: bytes) -> tuple[list[int], int, float, int]:
        """Token ids, most new tokens, temperature and seed of a request. A question without a seed
        has one of its own, so that it is answered the same when it is asked again. Raises
        Refused."""
        request = ChatRequest.read(data, self._tokenizer)
        token_ids = self._token_ids(request)
        room = self._longest - len(token_ids)
        if room < 1:
            raise Refused(
                400,
                f"the question has {len(token_ids)} tokens and leaves no room for an answer within "
                f"model.max_length={self._longest}; raise that, or ask less",
            )
        seed = request.seed
        if seed is None:
            digest = hashlib.sha256(json.dumps(token_ids).encode()).digest()
            seed = int.from_bytes(digest[:4])
        return token_ids, min(request.most or room, room), request.temperature, seed

    def _token_ids(self, request: ChatRequest) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(
                request.messages, tokenize=False, add_generation_prompt=True, **request.more
            )
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # of Jinja, what a template raises itself, a text of no UTF-8
            raise Refused(
                400, f"the model's chat template refuses the messages: {error}"
            ) from error
        if foreign := foreign_ids(self._tokenizer, token_ids):
            token = self._tokenizer.decode(foreign[:1])
            raise Refused(
                400, f"a message holds {token!r}, which the tokenizer has and the model lacks"
            )
        return token_ids


def _while_there(waiting: Future[Written], asker: socket.socket | None) -> Written:
    """What comes of `waiting`, which is cancelled when nobody waits for it any more."""
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until and not _is_gone(asker):
        with suppress(TimeoutError):
            return waiting.result(LOOK_S)
        if waiting.done():  # it has ended meanwhile, or with a time-out of its own
            return waiting.result()
    waiting.cancel()
    raise Refused(504, f"given up: nobody waits for it, or it took {ANSWER_S:g} s")


def _is_gone(asker: socket.socket | None) -> bool:
    if asker is None or not select.select([asker], [], [], 0)[0]:
        return False
    try:
        return not asker.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def _awaited(call: Awaitable[Written]) -> Written:
    return await call


def _handler(server: OwnEngines) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            try:
                data = self._body()
                if self.path != PATH:
                    raise Refused(404, f"there is nothing at {self.path}, only {PATH}")
                self._send(200, server.answer(data, self.connection))
            except Refused as error:
                self._send(error.status, {"error": {"message": str(error)}})
            except Exception as error:  # an engine that fails
                self._send(500, {"error": {"message": f"{type(error).__name__}: {error}"}})

        def _body(self) -> bytes:
            """What was sent; its length is told by who sends it. Raises Refused for one that is
            none, or too long; the connection is then of no more use, since where the next request
            begins is not known."""
            told = self.headers.get("Content-Length", "")
            if not (told.isascii() and told.isdigit()) or len(told) > 20:
                self.close_connection = True
                raise Refused(411, f"Content-Length is {told[:20]!r}, which is no length")
            if int(told) > MOST_BYTES:
                self.close_connection = True
                raise Refused(413, f"a request has at most {MOST_BYTES:,} bytes, not {told}")
            return self.rfile.read(int(told))

        def _send(self, status: int, body: dict[str, Any]) -> None:
            """Nobody may be there to hear it."""
            with suppress(ConnectionError):
                self._sent(status, body)

        def _sent(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler
