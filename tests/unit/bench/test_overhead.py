"""What a check takes, out of the seconds of steps."""

from __future__ import annotations

import pytest

from lora_moe_rl.bench import overhead
from lora_moe_rl.bench.overhead import ALL, CLOCKED, IN_TURNS, measure, of_turns
from lora_moe_rl.bench.step import make_config
from lora_moe_rl.errors import BenchmarkError


def steps(spent, checked):
    kept = {"refit/proof_seconds": 0.1, "time/copies": 0.02, "time/records": 0.03}
    return [
        {"time/step": s, "refit/compared": c, "replay/audited": c} | kept
        for s, c in zip(spent, checked, strict=True)
    ]


def test_a_checked_step_is_compared_with_those_beside_it_also_where_steps_grow_longer():
    records = steps([1.0, 1.35, 1.2, 1.55, 1.4], [0, 1, 0, 1, 0])
    assert of_turns(records, "refit/compared") == pytest.approx(0.25 / 1.35)


@pytest.mark.parametrize("checked", [[0, 1, 1, 0], [0, 0, 0, 0]])
def test_a_check_that_is_not_in_every_second_step_has_no_share(checked):
    with pytest.raises(BenchmarkError, match="refit/compared is not above 0 in every second step"):
        of_turns(steps([1.0] * 4, checked), "refit/compared")


def test_every_setting_is_one_that_a_run_has_and_that_is_on_by_default(tmp_path):
    config = make_config(tmp_path, 3)
    assert all(overhead.default(config, key) > 0 for key, _ in IN_TURNS.values())
    assert config.trainer.max_restarts and config.logging.samples_per_step


class WrittenRuns:
    """Every second step is checked: 1.2 s, and 1.0 s without."""

    def __init__(self, tmp_path):
        self.config, self.made = make_config(tmp_path, 3), []

    def measured(self, name, *settings):
        self.made.append(settings)
        return steps([1.0, 1.2, 1.0, 1.2, 1.0], [0, 1, 0, 1, 0])


def test_shares_are_of_a_step_as_often_as_a_check_is_made_by_default(tmp_path):
    runs = WrittenRuns(tmp_path)
    found = measure(runs)
    assert runs.made == [("replay.audit=2",), ("refit.compare_every=2",)]
    audit, slots = IN_TURNS
    proof, copies, records = CLOCKED
    wanted = {audit: 0.2 / 10, slots: 0.2 / 50, proof: 0.1, copies: 0.02, records: 0.03}
    assert found["shares"] == pytest.approx(wanted | {ALL: 0.174}) and found["step_seconds"] == 1.0
