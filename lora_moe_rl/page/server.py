"""The page as a local web server.

It answers this machine alone: it listens on the loopback, and refuses requests that name another
host, so that no site that a browser is on can read runs through a name that points here. It serves
no files but its own; runs are looked up by name among those that were found.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.run_dir import TIMELINE_TRACE
from lora_moe_rl.page.answers import ANSWERS, BadQuery, Query
from lora_moe_rl.page.link import HOST
from lora_moe_rl.page.runs import Runs
from lora_moe_rl.page.web_files import SCRIPTS, STYLE, page_html, web_file

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(root: Path) -> Starlette:
    """The page of the runs below `root`."""
    runs = Runs(root)

    def page(_: Request) -> Response:
        return Response(page_html(), media_type="text/html", headers=HEADERS)

    def own_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in (*SCRIPTS, STYLE):
            return _json({"error": f"there is no {name}"}, 404)
        kind = "text/css" if name == STYLE else "text/javascript"
        return Response(web_file(name), media_type=kind, headers=HEADERS)

    def all_runs(_: Request) -> Response:
        return _json({"root": str(runs.root), "runs": [run.summary() for run in runs.look()]})

    def answer(request: Request) -> Response:
        question, name = request.path_params["question"], request.query_params.get("run", "")
        if question not in ANSWERS:
            return _json({"error": f"there is no question {question!r}"}, 404)
        if (run := runs.get(name)) is None:
            return _json({"error": f"there is no run {name!r} below {runs.root}"}, 404)
        try:
            found = ANSWERS[question](run, Query(request.query_params.multi_items()))
        except BadQuery as error:
            return _json({"error": str(error)}, 400)
        return _json({"error": "there is no such sample"}, 404) if found is None else _json(found)

    def trace(request: Request) -> Response:
        run = runs.get(request.query_params.get("run", ""))
        path = None if run is None else run.path / TIMELINE_TRACE
        if path is None or not path.is_file():
            return _json({"error": "there is no trace; `lora-moe-rl timeline RUN` makes one"}, 404)
        disposition = {"Content-Disposition": f'attachment; filename="{TIMELINE_TRACE}"'}
        return Response(path.read_bytes(), headers=HEADERS | disposition)

    routes = [
        Route("/", page),
        Route("/web/{name}", own_file),
        Route("/api/runs", all_runs),
        Route("/api/trace", trace),
        Route("/api/{question}", answer),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=routes, middleware=[hosts])


def _json(content: dict[str, Any], status: int = 200) -> Response:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone half of a surrogate pair is JSON, and no UTF-8.
    return Response(
        text.encode("utf-8", "replace"), status, media_type="application/json", headers=HEADERS
    )


def listen(port: int) -> socket.socket:
    """A socket on the loopback; port 0 is any that is free. Raises ConfigError when the port is
    taken."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
    except (OSError, OverflowError) as error:  # the second: no port at all
        found.close()
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--port {port} cannot be had on {HOST}: {why}; name another, or 0 for any that is free"
        ) from error
    return found


def make_server(root: Path) -> uvicorn.Server:
    config = uvicorn.Config(make_app(root), log_level="warning", lifespan="off")
    return uvicorn.Server(config)
