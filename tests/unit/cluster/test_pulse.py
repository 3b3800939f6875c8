"""When an engine counts as silent."""

from lora_moe_rl.cluster.pulse import LOOKS, UNHEARD, Pulse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[Pulse, Clock]:
    """An engine that has a request, and was looked at once."""
    clock = Clock()
    pulse = Pulse(100, clock)
    pulse.begin()
    pulse.heard((0, 1))
    return pulse, clock


def look(pulse: Pulse, *beats: object) -> list[bool]:
    found = []
    for beat in beats:
        pulse.heard(beat)
        found.append(pulse.silent)
    return found


def test_an_engine_that_shows_the_same_beat_in_all_looks_is_silent():
    pulse, _ = make()
    assert look(pulse, *[(0, 1)] * LOOKS) == [False] * (LOOKS - 1) + [True]


def test_one_that_does_not_answer_is_too():
    pulse, _ = make()
    assert look(pulse, *[UNHEARD] * LOOKS) == [False] * (LOOKS - 1) + [True]


def test_a_token_or_the_end_of_a_request_is_a_sign_of_work():
    pulse, _ = make()
    assert not any(look(pulse, *[(0, 1)] * (LOOKS - 1), (0, 2), *[(0, 2)] * (LOOKS - 1)))
    pulse.begin()
    pulse.end()
    assert not any(look(pulse, *[(0, 2)] * (LOOKS - 1)))


def test_a_new_request_is_none():
    pulse, _ = make()
    look(pulse, *[(0, 1)] * (LOOKS - 1))
    pulse.begin()
    assert look(pulse, (0, 1)) == [True]


def test_without_requests_the_count_begins_anew():
    pulse, clock = make()
    look(pulse, *[(0, 1)] * (LOOKS - 1))
    pulse.end()
    clock.now = 1000.0
    pulse.begin()
    assert not pulse.due() and not any(look(pulse, *[(0, 1)] * (LOOKS - 1)))


def test_a_controller_that_was_busy_itself_has_looked_once():
    pulse, clock = make()
    clock.now = 100_000.0
    assert pulse.due() and look(pulse, (0, 1)) == [False]


def test_of_many_who_wait_one_looks():
    pulse, clock = make()
    clock.now = 10.0
    assert [pulse.due() for _ in range(4)] == [True, False, False, False]
    clock.now = 19.0
    assert not pulse.due()
    clock.now = 20.0
    assert pulse.due()
