"""A request that is not answered, as OpenAI's API says so."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """`status` is HTTP's; `code` is for programs, `message` names the value and the way out.
    `retry_after_s`: when it may be asked again."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int | None = None):
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": error}


def bad_request(message: str) -> Refused:
    return Refused(400, "invalid_request", message)
