"""Answers in JSON, to the clients of the endpoint and of the service."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


class Json(JSONResponse):
    """What clients and rows say may hold half of a surrogate pair, which is JSON only when it is
    escaped."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except UnicodeEncodeError:
            return json.dumps(content, allow_nan=False).encode()
