"""The owner's key, as an environment variable has it."""

import pytest

from lora_moe_rl.endpoint.keys import key_of_variable
from lora_moe_rl.endpoint.sessions import Session, Sessions
from lora_moe_rl.errors import ConfigError


@pytest.mark.parametrize("value", ["mine", " mine\n"])
def test_blanks_at_an_end_are_none_of_it(monkeypatch, value):
    monkeypatch.setenv("KEY", value)
    assert key_of_variable("KEY", "--key-env ") == "mine"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "--key-env KEY: there is no such environment variable"),
        (" \n", "or it holds no key in ASCII"),
        ("clé", "or it holds no key in ASCII"),
        ("session-mine", "begins with session-, as those of sessions do"),
    ],
)
def test_what_opens_nothing_is_refused(monkeypatch, value, told):
    monkeypatch.delenv("KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("KEY", value)
    with pytest.raises(ConfigError, match=told):
        key_of_variable("KEY", "--key-env ")


def test_a_sessions_key_is_refused_as_the_owners(monkeypatch):
    session = Session(None)
    monkeypatch.setenv("KEY", session.key)
    with pytest.raises(ConfigError, match="begins with session-"):
        key_of_variable("KEY", "--key-env ")
    assert not Sessions(session.key).is_owner(session.key)
