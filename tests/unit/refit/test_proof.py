"""The served proof: what it accepts, what it refuses, what it cannot tell."""

import numpy as np
import pytest

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.proof import (
    PROBE_TOKENS,
    Tolerance,
    check_pieces,
    check_served,
    pieces,
    probe_sequences,
    tolerance_of,
)

BASE = [np.array([-1.0, -2.0, -3.0]), np.array([-0.5, -4.0])]


def shifted(amount: float) -> list[np.ndarray]:
    """Logprobs `amount` away from the base's, in alternating directions."""
    return [base + amount * np.where(np.arange(len(base)) % 2, 1, -1) for base in BASE]


EXACT = tolerance_of("float32")
ROUNDED = tolerance_of("bfloat16")


def check(engine, trainer, engine_base=BASE, trainer_base=BASE, tolerance=EXACT, older=None):
    return check_served(engine, trainer, engine_base, trainer_base, tolerance, 7, older)


def test_a_probe_is_never_longer_than_an_engine_takes():
    prompts = [[1, 2, 3], list(range(40)), list(range(500))]
    assert probe_sequences(prompts, max_length=64) == [
        [1, 2, 3, 1, 2, 3],
        (prompts[1] * 2)[:63],
        prompts[2][:63],
    ]
    assert [len(p) for p in probe_sequences(prompts, 4096)] == [6, 80, PROBE_TOKENS]


def test_a_served_version_passes():
    proof = check(shifted(0.1 + 1e-5), shifted(0.1))
    assert proof.told
    assert proof.max_diff == pytest.approx(1e-5, rel=1e-3)


def test_serving_the_base_is_an_error():
    with pytest.raises(RefitError, match="serves the base instead of adapter version 7"):
        check(shifted(0.0), shifted(0.1))


def test_serving_the_base_is_an_error_even_within_the_tolerance():
    with pytest.raises(RefitError, match="serves the base"):
        check(shifted(0.0), shifted(5e-5))


def test_another_adapter_is_an_error():
    with pytest.raises(RefitError, match=r"differ by 5\.00e-02"):
        check(shifted(0.15), shifted(0.1))


def test_an_adapter_without_effect_cannot_be_told_from_the_base():
    proof = check(shifted(1e-7), shifted(0.0), engine_base=shifted(1e-7))
    assert not proof.told


def test_an_effect_below_the_engines_own_difference_cannot_be_told():
    proof = check(shifted(1e-5), shifted(2e-5), engine_base=shifted(1e-5))
    assert not proof.told


def test_serving_an_older_version_is_an_error_even_within_the_tolerance():
    older = {5: shifted(0.1 - 4e-5), 6: shifted(0.1 - 2e-5)}
    assert check(shifted(0.1 + 1e-6), shifted(0.1), older=older).told
    for version, scores in older.items():
        with pytest.raises(RefitError, match=f"serves version {version} instead of .* version 7"):
            check(scores, shifted(0.1), older=older)


def test_an_older_version_that_scores_the_same_cannot_be_told():
    assert not check(shifted(0.1), shifted(0.1), older={6: shifted(0.1)}).told


def test_one_tokens_noise_does_not_decide_between_two_versions():
    """All tokens but one are those of version 7, and the two versions differ in that one alone."""
    trainer, older = [np.zeros(500)], [np.zeros(500)]
    older[0][3] = 0.05
    engine = [older[0] * 0.6]
    base = [np.full(500, 1.0)]
    assert not check(engine, trainer, base, base, tolerance=ROUNDED, older={6: older}).told


def test_small_noise_on_all_tokens_hides_no_version():
    """Each token's noise is twice what the versions differ by there; over all tokens they do."""
    draw = np.random.default_rng(0)
    base, trainer = [np.zeros(2000)], [draw.standard_normal(2000)]
    older = {6: [trainer[0] + 0.01 * draw.choice([-1, 1], 2000)]}
    noise = 0.02 * draw.standard_normal((2, 2000))
    for served, told in ((trainer, True), (older[6], False)):
        engine = [served[0] + noise[0]]
        if told:
            assert check(engine, trainer, [noise[1]], base, ROUNDED, older).told
        else:
            with pytest.raises(RefitError, match="serves version 6"):
                check(engine, trainer, [noise[1]], base, ROUNDED, older)


def test_pieces_are_other_ones_for_each_seed_and_reach_every_token():
    lengths, seen = [400] * 8, set()
    for step in range(40):
        found = pieces(lengths, 2, 101, (0, step))
        assert found == pieces(lengths, 2, 101, (0, step))
        assert len({number for number, _ in found}) == 2
        for number, where in found:
            assert where.start >= 0 and where.stop <= 400 and where.stop - where.start == 100
            seen |= {(number, token) for token in range(400)[where]}
    assert {number for number, _ in seen} == set(range(8)) and len(seen) > 0.75 * 3200


def test_pieces_of_what_cannot_be_scored_are_none():
    assert pieces([1], 2, 64, (0, 1)) == [] and pieces([], 2, 64, (0, 1)) == []
    short = [[5], [1, 2], [3, 4]]
    found = pieces([len(ids) for ids in short], 5, 64, (0, 1))
    assert sorted(short[number][where] for number, where in found) == [[1, 2], [3, 4]]


def test_pieces_that_engine_and_trainer_score_otherwise_are_an_error():
    assert check_pieces([], [], EXACT, 7) == (0, True)
    assert check_pieces(BASE, BASE, EXACT, 7) == (0, True)
    with pytest.raises(RefitError, match=r"version 7: .* differ by 2.00e-04 .* step's samples"):
        check_pieces(shifted(2e-4), BASE, EXACT, 7)


def test_the_logprob_of_an_unlikely_token_may_be_as_far_off_as_it_is_large():
    far = [np.array([-0.5, -24.2])]
    assert check_pieces([far[0] + [0.0, 2e-3]], far, EXACT, 7) == (pytest.approx(2e-3), True)
    for off in ([0.0, 3e-3], [1.1e-4, 0.0]):
        with pytest.raises(RefitError, match="more than 1.00e-04 times its size"):
            check_pieces([far[0] + off], far, EXACT, 7)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_logprobs_that_are_not_finite_are_an_error(value):
    engine = shifted(0.1)
    engine[1][0] = value
    with pytest.raises(RefitError, match="engine logprobs hold NaN"):
        check(engine, shifted(0.1))


def test_probes_of_different_length_are_an_error():
    with pytest.raises(RefitError, match="5 tokens against one of 3"):
        check(shifted(0.1), shifted(0.1)[:1])


def test_default_tolerances():
    assert Tolerance(1e-4) == EXACT and Tolerance(0.15, rounds=True) == ROUNDED
    assert tolerance_of("float32", eight_bits=True) == ROUNDED
    assert tolerance_of("bfloat16", token=0.3) == Tolerance(0.3, rounds=True)
    assert tolerance_of("float32", token=0.3) == Tolerance(0.3)


def test_a_token_that_rounding_puts_beyond_the_tolerance_leaves_a_version_untold():
    trainer = [np.linspace(-3.0, -0.1, 20)]
    engine = [trainer[0] + 0.01]
    engine[0][-1] += 0.6
    base = [np.full(20, -9.0)]
    assert check([trainer[0] + 0.01], trainer, base, base, ROUNDED).told
    proof = check(engine, trainer, base, base, ROUNDED)
    assert not proof.told and proof.max_diff == pytest.approx(0.61)
    assert check_pieces(engine, trainer, ROUNDED, 7) == (pytest.approx(0.61), False)
    with pytest.raises(RefitError, match="differ by 6.10e-01 in logprob on the probe"):
        check(engine, trainer, base, base, EXACT)


@pytest.mark.parametrize("beyond", [3, 5, 20])
def test_more_tokens_than_rounding_puts_beyond_are_an_error(beyond):
    trainer = [np.full(20, -0.5)]
    engine = [trainer[0] + 0.3 * (np.arange(20) < beyond)]
    with pytest.raises(
        RefitError, match="times its size in root mean square, and 3.00e-01 at most"
    ):
        check_pieces(engine, trainer, ROUNDED, 7)


def test_all_tokens_a_little_off_are_an_error_too():
    trainer = [np.full(200, -0.5)]
    assert check_pieces([trainer[0] + 0.049], trainer, ROUNDED, 7)[1]
    with pytest.raises(RefitError, match="in root mean square"):
        check_pieces([trainer[0] + 0.051], trainer, ROUNDED, 7)
