"""The served proof: what it accepts, what it refuses, what it cannot tell."""

import numpy as np
import pytest

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.proof import PROBE_TOKENS, check_served, default_tolerance, probe_sequences

BASE = [np.array([-1.0, -2.0, -3.0]), np.array([-0.5, -4.0])]


def shifted(amount: float) -> list[np.ndarray]:
    """Logprobs `amount` away from the base's, in alternating directions."""
    return [base + amount * np.where(np.arange(len(base)) % 2, 1, -1) for base in BASE]


def check(engine, trainer, engine_base=BASE, trainer_base=BASE, tolerance=1e-4):
    return check_served(engine, trainer, engine_base, trainer_base, tolerance, version=7)


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
    assert proof.applied is True and proof.version == 7
    assert proof.max_diff == pytest.approx(1e-5, rel=1e-3)
    assert proof.trainer_effect == pytest.approx(0.1)


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
    assert proof.applied is None and proof.trainer_effect == 0


def test_an_effect_below_the_engines_own_difference_cannot_be_told():
    proof = check(shifted(1e-5), shifted(2e-5), engine_base=shifted(1e-5))
    assert proof.applied is None


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
    assert default_tolerance("float32") == 1e-4
    assert default_tolerance("bfloat16") == 0.15
