"""Steps as a user names them."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.chosen_steps import steps_of
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("3", (3,)),
        ("3-5", (3, 4, 5)),
        (" 9, 3-5 ,4", (3, 4, 5, 9)),
        (3, (3,)),
        ([7, "1-2"], (1, 2, 7)),
        ((), ()),
    ],
)
def test_numbers_ranges_and_lists(given, steps):
    assert steps_of("logging.profile", given) == steps


@pytest.mark.parametrize("given", ["0", "5-3", "0-2", "-3", "3-", "3.5", "all", "", True, [None]])
def test_what_names_no_steps_is_refused_by_its_name(given):
    with pytest.raises(ValueError, match="logging.profile=.* names no steps: write one .3., a"):
        steps_of("logging.profile", given)


def test_a_range_that_fills_the_memory_is_refused():
    with pytest.raises(ValueError, match="logging.profile=1-99999999999 names 99999999999 steps"):
        steps_of("logging.profile", "1-99999999999")
    assert len(steps_of("logging.profile", "99999990000-99999999999")) == 10_000


def test_on_the_command_line_and_in_a_saved_config():
    config = override(RunConfig(), ["logging.profile=3-4,9"])
    assert config.logging.profile == (3, 4, 9)
    assert override(RunConfig(), ["logging.profile=[3, 4]"]).logging.profile == (3, 4)
    assert "profile:" in to_yaml(config)
    with pytest.raises(ConfigError, match="logging.profile=4-x names no steps"):
        override(RunConfig(), ["logging.profile=4-x"])


def test_a_step_that_the_run_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="no step 9 in a run of trainer.steps=5; .* 1 to 5"):
        override(RunConfig(), ["trainer.steps=5", "logging.profile=2,9"])
