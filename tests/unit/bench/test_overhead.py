"""What a check takes, out of the seconds of steps."""

from __future__ import annotations

import pytest

from lora_moe_rl.bench import overhead
from lora_moe_rl.bench.overhead import ALL, ALL_OFF, IN_TURNS, KEPT, PROOF, measure, of_turns
from lora_moe_rl.bench.step import make_config
from lora_moe_rl.errors import BenchmarkError


def steps(spent, checked):
    return [
        {"time/step": s, "refit/compared": c, "refit/proof_seconds": 0.1}
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
    keys = [*(key for key, _ in IN_TURNS.values()), *KEPT.values()]
    assert all(overhead.default(config, key) > 0 for key in keys)
    assert sorted(ALL_OFF) == sorted(f"{key}=0" for key in keys)


class WrittenRuns:
    """1.3 s with all, 0.02 less without copies, 0.05 less without anything; a proof of 0.1 s."""

    def __init__(self, tmp_path):
        self.config, self.made = make_config(tmp_path, 3), []

    def measured(self, name, *settings):
        self.made.append((name, settings))
        less = {"trainer.max_restarts=0": 0.02, "replay.audit=0": 0.05}
        spent = 1.3 - sum(less.get(one, 0.0) for one in settings[:1])
        if settings and settings[0].endswith("=2"):
            return [
                record | {"replay/audited": record["refit/compared"]}
                for record in steps([1.0, 1.2, 1.0, 1.2, 1.0], [0, 1, 0, 1, 0])
            ]
        return steps([spent] * 3, [0] * 3)


def test_shares_are_of_a_step_as_often_as_a_check_is_made_by_default(tmp_path):
    shares = measure(WrittenRuns(tmp_path), 2)
    audit, slots = IN_TURNS
    copies, samples = KEPT
    assert shares[audit] == pytest.approx(0.2 / 10) and shares[slots] == pytest.approx(0.2 / 50)
    assert shares[copies] == pytest.approx(0.02 / 1.3) and shares[samples] == pytest.approx(0)
    assert shares[PROOF] == pytest.approx(0.1 / 1.3)
    assert shares[ALL] == pytest.approx((0.05 + 0.1) / 1.3)
