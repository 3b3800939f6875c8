"""The keys that open an endpoint."""

from __future__ import annotations

import os

from lora_moe_rl.errors import ConfigError

SESSION_PREFIX = "session-"  # of the keys that sessions are given


def key_of_variable(variable: str, option: str) -> str:
    """The owner's key, of an environment variable. Raises ConfigError, which says `option`."""
    key = os.environ.get(variable, "").strip()  # HTTP takes blanks at an end off
    if not key.isascii() or not key:
        raise ConfigError(
            f"{option}{variable}: there is no such environment variable, or it holds no key in "
            "ASCII; set it to the key that is to be sent"
        )
    if key.startswith(SESSION_PREFIX):
        raise ConfigError(
            f"{option}{variable}: it holds a key that begins with {SESSION_PREFIX}, as those of "
            "sessions do, so that it would open nothing; set it to another"
        )
    return key
