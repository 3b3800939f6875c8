"""What arrives of a change, by hand; and that stochastic rounding takes none of it away."""

from __future__ import annotations

import math

import pytest
import torch

from lora_moe_rl.kernels.merge import formats
from lora_moe_rl.kernels.merge.rounding import Arrived, measure, round_to, seed_of

DTYPES = [torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_arrived_by_hand():
    """W = (8, 4), D = (1, 2); of it (2, 0) arrives: the product with D is 2 of 5."""
    found = measure(torch.tensor([8.0, 4.0]), torch.tensor([1.0, 2.0]), torch.tensor([10.0, 4.0]))
    assert (found.error, found.value, found.change, found.got) == pytest.approx((5, 117, 5, 4))
    assert found.lost == pytest.approx(3 / 5)
    assert found.cosine == pytest.approx(2 / math.sqrt(5 * 4))
    assert found.error_over_change == pytest.approx(1)
    assert found.relative == pytest.approx(math.sqrt(5 / 117))


def test_nothing_wanted():
    nothing = Arrived(value=9.0)
    assert (nothing.lost, nothing.error_over_change, nothing.cosine) == (0, 0, 1)
    noise = Arrived(error=1.0, value=9.0, got=1.0)
    assert (noise.lost, noise.error_over_change, noise.cosine) == (math.inf, math.inf, 0)


def in_fp8(value):
    return formats.dequantise_fp8(*formats.quantise_fp8(value))


def in_int4(value):
    return formats.dequantise_int4(*formats.quantise_int4(value, torch.bfloat16))


FORMS = {
    "bfloat16": lambda value: round_to(value, torch.bfloat16).float(),
    "float16": lambda value: round_to(value, torch.float16).float(),
    "FP8": in_fp8,
    "INT4": in_int4,
    "bfloat16, stochastic": lambda v: round_to(v, torch.bfloat16, "stochastic", 1).float(),
}
# The table of docs/merging.md: lost and cosine, by form and by change / weight.
TABLE = {
    "bfloat16": {1e-2: (0.0, 0.99), 1e-3: (0.48, 0.64), 1e-4: (0.94, 0.21)},
    "float16": {1e-2: (0.0, 1.0), 1e-3: (0.0, 0.98), 1e-4: (0.57, 0.58)},
    "FP8": {1e-2: (0.65, 0.48), 1e-3: (0.96, 0.1), 1e-4: (1.0, 0.02)},
    "INT4": {1e-2: (0.83, 0.03), 1e-3: (0.74, 0.0), 1e-4: (None, 0.0)},
    "bfloat16, stochastic": {1e-2: (0.0, 0.97), 1e-3: (0.0, 0.52), 1e-4: (0.0, 0.17)},
}


@pytest.mark.parametrize("ratio", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("form", FORMS)
def test_what_each_form_loses(form, ratio):
    """Normal weights, a normal change."""
    rounded = FORMS[form]
    before = FORMS[form.partition(",")[0]](draw(512, 512))
    change = ratio * draw(512, 512, seed=1)
    found = measure(before, change, rounded(before + change))
    lost, cosine = TABLE[form][ratio]
    assert found.cosine == pytest.approx(cosine, abs=0.01)
    if lost is None:  # the noise is a thousand times the change, and so is its part along it
        assert found.error_over_change > 500
    else:
        assert found.lost == pytest.approx(lost, abs=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [1e-3, 1e-4, 1e-5])
def test_the_mean_over_seeds_of_stochastic_rounding_is_the_wanted_value(dtype, ratio):
    """The standard error of the share that arrives, of n elements and k seeds, is at most
    sqrt(step / |D| / (n k)): 2 % here at 1e-5 in bfloat16. Nearest is far outside."""
    before = draw(128, 128).to(dtype).float()
    change = ratio * draw(128, 128, seed=1)
    seeds = range(100)
    mean = torch.stack(
        [round_to(before + change, dtype, "stochastic", seed).float() - before for seed in seeds]
    ).mean(0)
    share = float((mean * change).sum() / (change * change).sum())
    assert share == pytest.approx(1, abs=0.06)
    assert float((mean - change).mean() / change.abs().mean()) == pytest.approx(0, abs=0.06)
    found = measure(before, change, round_to(before + change, dtype).float())
    assert found.lost > 0.3 or (dtype, ratio) == (torch.float16, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-30, -26, -16, -14, 0, 3])
def test_it_goes_to_a_neighbour_with_the_right_probability(dtype, power):
    """A quarter of the way between neighbours, negative ones too, and below the smallest normal
    float16: a quarter of 4,000 draws goes up, within 5 standard deviations."""
    step = max(
        2.0**power * torch.finfo(dtype).eps, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    )
    low = torch.tensor(2.0**power).to(dtype).float() // step * step
    value = (low + step / 4) * torch.tensor([1.0, -1.0])
    found = round_to(value.repeat(4000, 1), dtype, "stochastic", 5).float().abs()
    assert set(found.unique().tolist()) == {float(low), float(low + step)}
    share = (found > low).float().mean(0)
    assert (share - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / 4000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_dtype_holds_stays(dtype):
    limits = torch.finfo(dtype)
    tiny = limits.tiny * limits.eps
    values = [0.0, -0.0, 1.0, -3.5, limits.max, -limits.max, limits.tiny, tiny, -3 * tiny]
    value = torch.cat([torch.tensor(values), draw(10_000).to(dtype).float()])
    for seed in range(20):
        found = round_to(value, dtype, "stochastic", seed)
        assert torch.equal(found.view(torch.int16), value.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_and_nan_stay_and_what_is_too_large_becomes_infinite(dtype):
    value = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38])
    found = round_to(value, dtype, "stochastic", 1).float()
    assert found[:2].tolist() == [math.inf, -math.inf] and found[2].isnan()
    assert found[3] >= 3.38e38 if dtype == torch.bfloat16 else found[3] == math.inf


def test_it_depends_on_the_seed_and_the_place_alone():
    value = draw(64, 48)
    whole = round_to(value, torch.bfloat16, "stochastic", seed_of(0, 7, "w"))
    again = round_to(value.clone(), torch.bfloat16, "stochastic", seed_of(0, 7, "w"))
    assert torch.equal(whole, again)
    rows = [
        round_to(part, torch.bfloat16, "stochastic", seed_of(0, 7, "w"), first=48 * start)
        for start, part in ((0, value[:10]), (10, value[10:]))
    ]
    assert torch.equal(torch.cat(rows), whole)
    for other in (seed_of(1, 7, "w"), seed_of(0, 8, "w"), seed_of(0, 7, "v"), seed_of(0, "7w")):
        differs = round_to(value, torch.bfloat16, "stochastic", other) != whole
        assert 0.2 < differs.float().mean() < 0.5  # a third, were all fractions as likely
    assert seed_of(0, 7, "w") == 1632350175616618771  # as on any other machine


def test_float32_is_not_rounded():
    value = draw(8)
    assert torch.equal(round_to(value, torch.float32, "stochastic", 3), value)
