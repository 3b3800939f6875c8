"""The keys of a trainer's state on disk."""

import pytest

from lora_moe_rl.errors import CheckpointError
from lora_moe_rl.files.trainer_state import KINDS, key, parse


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_tells_what_it_was_made_of(kind):
    assert parse(key(kind, "layers.0.q_proj.A", (0, 12))) == (kind, "layers.0.q_proj.A", (0, 12))


def test_keys_are_as_checkpoints_have_them():
    assert key("adapter", "layers.0.q_proj.A", (0, 0)) == "adapter|layers.0.q_proj.A|0,0"


@pytest.mark.parametrize("text", ["", "adapter|x", "adapter|x|", "adapter|x|0|0", "a|x|b"])
def test_what_is_no_key_is_refused(text):
    with pytest.raises(CheckpointError, match="is no slice of a trainer's state"):
        parse(text)
