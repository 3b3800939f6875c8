"""Where an endpoint listens."""

from __future__ import annotations

import pytest

from lora_moe_rl.endpoint.listening import Listening
from lora_moe_rl.errors import ConfigError


def test_it_listens_on_a_free_port_of_loopback_and_says_where():
    at = Listening("127.0.0.1", 0, "--key-env")
    try:
        assert at.url == f"http://127.0.0.1:{at.socket.getsockname()[1]}/v1"
        with pytest.raises(ConfigError, match="cannot listen"):
            Listening("192.0.2.1", 0)
    finally:
        at.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_a_key_it_is_not_to_be_reached_from_elsewhere(host):
    with pytest.raises(ConfigError, match="set --key-env"):
        Listening(host, 0, "--key-env")
