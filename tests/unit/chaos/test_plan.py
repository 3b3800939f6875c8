"""Plans of faults: by a seed alone, spread over the run, all kinds in turn."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_moe_rl.chaos.plan import FIRST, LAST_GOOD, plan, rate_of
from lora_moe_rl.errors import ConfigError

KINDS = ("a", "b", "c", "d")


@st.composite
def wanted(draw):
    """Kinds, rate, steps, seed of a plan that there is."""
    kinds = KINDS[: draw(st.integers(1, 4))]
    steps = draw(st.integers(6, 400))
    count = draw(st.integers(1, steps - LAST_GOOD - FIRST + 1))
    return kinds, Fraction(count, steps), steps, draw(st.integers(0, 2**32))


@given(wanted())
def test_there_are_as_many_as_the_rate_makes_and_each_has_its_own_stretch(asked):
    _, rate, steps, _ = asked
    faults = plan(*asked)
    assert len(faults) == rate * steps
    at = [fault.step for fault in faults]
    assert at == sorted(set(at)) and min(at) >= 2 and max(at) <= steps - 2
    stretch = (steps - 3) / len(faults)
    for i, step in enumerate(at):
        assert i * stretch - 1 <= step - 2 < (i + 1) * stretch
    assert all(0 <= fault.phase < 1 for fault in faults)


@given(wanted())
def test_all_kinds_come_before_one_comes_again(asked):
    kinds, *_ = asked
    faults = plan(*asked)
    for end in range(len(faults) + 1):
        counts = Counter(fault.kind for fault in faults[:end])
        assert max(counts.values(), default=0) - min(counts[kind] for kind in kinds) <= 1


@given(wanted())
def test_the_seed_alone_says_which(asked):
    assert plan(*asked) == plan(*asked)


def test_other_seeds_make_other_plans():
    plans = {tuple(plan(KINDS, Fraction(1, 20), 200, seed)) for seed in range(20)}
    assert len(plans) == 20


def test_one_in_twenty_of_200_steps_is_ten():
    assert len(plan(KINDS, rate_of("1/20"), 200, 0)) == 10
    assert rate_of("0.05") == Fraction(1, 20)


@pytest.mark.parametrize("text", ["", "often", "0", "-1/2", "3/2", "1/0", "nan"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ConfigError, match="--rate"):
        rate_of(text)


@pytest.mark.parametrize(("rate", "steps"), [("1/20", 9), ("1", 10), ("1/2", 3), ("1", 0)])
def test_a_run_without_room_for_its_faults_is_refused(rate, steps):
    with pytest.raises(ConfigError, match="makes"):
        plan(KINDS, rate_of(rate), steps, 0)
