"""What servers of tests on loopback share: JSON in, JSON out, and an end whatever hangs in them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_S = 30.0


class JsonServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: type[JsonHandler]):
        super().__init__(("127.0.0.1", 0), handler)
        self.lock = threading.Lock()
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def hang(self) -> None:
        self.ended.wait(HANG_S)


class JsonHandler(BaseHTTPRequestHandler):
    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def send(self, status: int, body: dict | str) -> None:
        """A text is sent as it is."""
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving[S: JsonServer](server: S) -> Iterator[S]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
