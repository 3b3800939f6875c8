"""`lora-moe-rl tinker` before it serves: what it refuses, and what ends its start."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from lora_moe_rl.errors import ActorFailed, ConfigError
from lora_moe_rl.service import command, start
from lora_moe_rl.service.command import _serve, main


class Starts:
    """A room whose start takes for ever, and what ended it."""

    def __init__(self, begun):
        self.turn, self.begun, self.ended = SimpleNamespace(on_death=None), begun, False

    async def start(self) -> None:
        asyncio.get_running_loop().call_later(0.01, self.begun, self)
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.ended = True
            raise


def serve(begun) -> Starts:
    room, stopped = Starts(begun), SimpleNamespace(stop=lambda: None)
    asyncio.run(_serve(room, stopped, None, None))
    return room


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start(number):
    assert serve(lambda room: os.kill(os.getpid(), number)).ended


def test_ranks_that_fail_end_a_start(monkeypatch):
    monkeypatch.setattr(command, "LAST_ANSWERS_S", 0.0)
    with pytest.raises(ActorFailed, match="rank-0"):
        serve(lambda room: room.turn.on_death(ActorFailed("rank-0", "killed")))


@pytest.mark.parametrize("spoilt", ["key", "folder"])
def test_what_cannot_serve_is_said_before_anything_starts(monkeypatch, tmp_path, spoilt):
    monkeypatch.setattr(start, "backend", lambda *parts: pytest.fail("it has started"))
    monkeypatch.setenv("KEY", "secret" if spoilt == "key" else "tml-secret")
    if spoilt == "folder":
        (tmp_path / start.MODELS).touch()
    with pytest.raises((ConfigError, OSError), match=r"must begin with tml-|models"):
        main(["qwen3_moe", "--dir", str(tmp_path), "--port", "0", "--key-env", "KEY"])
