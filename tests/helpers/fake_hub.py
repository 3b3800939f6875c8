"""A hub as far as pushing asks one: it makes repositories, says what they are, takes a commit."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """`repos`: {name: whether it is private}; `files`: {name: {path: content}}; `tokens`: what came
    as authorization, each once. `refuses`: an HTTP status that every commit gets."""

    def __init__(self):
        self.repos: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.tokens: set[str | None] = set()
        self.refuses = 0
        self.url = ""

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """What is answered to a POST, or to a GET with an empty body."""
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = "/".join(path.split("/")[3:5])
        if path.endswith("/preupload/main"):
            files = [{**one, "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return 200, {"files": [{**one, "shouldIgnore": False} for one in files]}
        if path.endswith("/commit/main"):
            return self._commit(name, body)
        if name in self.repos:
            return 200, {"id": name, "private": self.repos[name], "siblings": []}
        return 404, {"error": f"no {path}"}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.url}/{name}"
        if name in self.repos:
            return 409, {"error": "You already created this model repo", "url": url}
        self.repos[name] = asked.get("private") or asked.get("visibility") == "private"
        return 200, {"url": url}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        if self.refuses:
            return self.refuses, {"error": "you have no right to write here"}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.files.setdefault(name, {})[line["value"]["path"]] = content
        url = f"{self.url}/{name}/commit/0"
        return 200, {"commitUrl": url, "commitOid": "0" * 40, "success": True}


@contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, found = hub.answer(self.path.partition("?")[0], body)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
