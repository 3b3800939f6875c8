"""Whose turn it is, against what is on the devices: kept here by hand, and in nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_moe_rl.cluster.turns import LEADS_TO, Act, OutOfTurn, Phase, after

STEP = (Act.PAUSE, Act.GIVE_BACK, Act.FREE, Act.WAKE_SLOTS, Act.WRITE, Act.WAKE_CACHE, Act.SCORE)


class Devices(RuleBasedStateMachine):
    """Anything may be asked for at any time. What is allowed changes what is there, and must find
    there what it needs."""

    def __init__(self):
        super().__init__()
        self.phase = Phase.START
        self.there = {"slots", "cache"}
        self.requests, self.proven, self.written = 0, False, False

    def asked(self, act: Act) -> bool:
        try:
            self.phase = after(self.phase, act)
        except OutOfTurn:
            return False
        return True

    @rule()
    def sample(self):
        if self.asked(Act.SAMPLE):
            assert self.there == {"slots", "cache"} and self.proven
            self.requests += 1

    @rule()
    def score(self):
        if self.asked(Act.SCORE):
            assert self.there == {"slots", "cache"}

    @rule()
    def write(self):
        if self.asked(Act.WRITE):
            assert "slots" in self.there and "activations" not in self.there
            assert not self.requests
            self.proven, self.written = False, True

    @precondition(lambda self: not self.requests)
    @rule()
    def pause(self):
        self.asked(Act.PAUSE)

    @precondition(lambda self: self.requests)
    @rule()
    def requests_end(self):
        self.requests = 0

    @rule()
    def give_back(self):
        if self.asked(Act.GIVE_BACK):
            assert not self.requests
            self.there = {"activations"}  # the update begins

    @rule()
    def free(self):
        if self.asked(Act.FREE):
            self.there.remove("activations")

    @rule()
    def wake_slots(self):
        if self.asked(Act.WAKE_SLOTS):
            assert "slots" not in self.there
            self.there.add("slots")

    @rule()
    def wake_cache(self):
        if self.asked(Act.WAKE_CACHE):
            assert self.there == {"slots"}
            self.there.add("cache")

    @rule()
    def go_on(self):
        if self.asked(Act.GO_ON):
            assert self.there == {"slots", "cache"}
            self.proven = True

    @invariant()
    def cache_and_activations_are_never_there_at_once(self):
        assert not {"cache", "activations"} <= self.there

    @invariant()
    def while_requests_run_all_is_there(self):
        assert not self.requests or self.there == {"slots", "cache"}


test_whatever_is_asked_for_is_there_or_refused = Devices.TestCase


def test_a_step_goes_through_every_phase_and_back():
    phase, seen = after(Phase.START, Act.GO_ON), []
    for act in (Act.SAMPLE, *STEP, Act.GO_ON):
        phase = after(phase, act)
        seen.append(phase)
    assert phase is Phase.ROLLOUT and {*seen, Phase.START} == set(Phase)


@given(st.sampled_from(Phase), st.sampled_from(Act))
def test_what_has_no_place_is_refused_and_said(phase, act):
    if (phase, act) in LEADS_TO:
        assert after(phase, act) is LEADS_TO[phase, act]
        return
    with pytest.raises(OutOfTurn, match=f"'{act}' has no place in the phase '{phase}'"):
        after(phase, act)


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.FREED])
def test_no_slot_is_written_while_it_may_be_away(phase):
    with pytest.raises(OutOfTurn, match="only in start or refit"):
        after(phase, Act.WRITE)
