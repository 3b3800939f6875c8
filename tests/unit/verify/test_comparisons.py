"""Figures that logprobs are compared by."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lora_moe_rl.verify.compare import TOLERANCES
from lora_moe_rl.verify.comparisons import largest_scaled, left_of
from lora_moe_rl.verify.layout import LEFT

BASE = [np.array([-2.0, -12.0]), np.array([-1.0])]
MERGED = [np.array([-2.3, -9.0]), np.array([-1.4])]


def test_how_much_of_an_adapter_is_missing():
    assert left_of(MERGED, MERGED, BASE) == 0 and left_of(BASE, MERGED, BASE) == 1
    half = [(a + b) / 2 for a, b in zip(BASE, MERGED, strict=True)]
    assert left_of(half, MERGED, BASE) == pytest.approx(0.5)
    assert math.isnan(left_of(BASE, BASE, BASE))  # an adapter that changes nothing shows nothing
    assert math.isnan(left_of([np.array([np.nan, -9.0]), MERGED[1]], MERGED, BASE))
    with pytest.raises(ValueError, match="2 logprobs against 3 and 3"):
        left_of(BASE[:1], MERGED, BASE)


def test_an_adapter_that_is_not_applied_is_seen_in_bfloat16_too():
    """Its logprobs are within what bfloat16 is allowed against Hugging Face."""
    assert largest_scaled(BASE, MERGED) < TOLERANCES["cpu", "bfloat16"]["Hugging Face"]
    assert left_of(BASE, MERGED, BASE) > LEFT
