"""Bodies that are refused before they are here."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from lora_moe_rl.endpoint.receiving import body_of
from lora_moe_rl.endpoint.refusal import Refused


def request(parts: list[bytes], said: str | None) -> Request:
    """`said`: what it says of its length."""
    left = list(parts)

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [] if said is None else [(b"content-length", said.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


@pytest.mark.parametrize("said", [None, "10", "0", "none", "-3"])
async def test_a_body_of_the_longest_length_is_taken(said):
    assert await body_of(request([b"12345", b"67890"], said), longest=10) == b"1234567890"


async def test_one_that_says_that_it_is_too_long_is_not_waited_for():
    asked = request([], "11")
    with pytest.raises(Refused, match="at most 10 bytes") as caught:
        await body_of(asked, longest=10)
    assert caught.value.status == 413


async def test_one_that_is_longer_than_it_says_is_refused_as_it_comes():
    with pytest.raises(Refused, match="at most 10 bytes"):
        await body_of(request([b"12345", b"67890", b"1"], "5"), longest=10)
