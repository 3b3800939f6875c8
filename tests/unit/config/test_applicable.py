"""Options that would have no effect are refused, with what decides it."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError

LAG = ("schedule.lag=1", "refit.slots=3", "algorithm.correction=tis")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["replay.mode=off", "replay.audit_samples=8"],
            "replay.audit_samples=8 has no effect with replay.mode=off",
        ),
        (
            ["replay.audit=0", "replay.audit_samples=8"],
            "replay.audit_samples=8 has no effect with replay.audit=0",
        ),
        (
            ["mismatch.stop_above_old=0.3"],
            "mismatch.stop_above_old=0.3 has no effect with schedule.lag=0",
        ),
        (["schedule.stale=drop"], "schedule.stale=drop has no effect with schedule.lag=0"),
    ],
)
def test_an_option_without_effect_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_applicable(override(RunConfig(), settings))


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["replay.mode=off"],
        ["replay.audit_samples=8"],
        [*LAG, "mismatch.stop_above_old=0.3"],
        [*LAG, "schedule.stale=drop"],
    ],
)
def test_an_option_with_effect_is_not(settings):
    check_applicable(override(RunConfig(), settings))
