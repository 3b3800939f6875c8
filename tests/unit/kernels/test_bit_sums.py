"""Sums of a tensor's bits, against arithmetic in Python's integers."""

from __future__ import annotations

import pytest
import torch

from lora_moe_rl.kernels import bit_sums
from lora_moe_rl.kernels.bit_sums import bit_sum

FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
FEW = 8  # words of a part


def by_hand(words: list[int]) -> int:
    total = 0
    for first in range(0, len(words), FEW):
        total *= FACTORS[0]
        for place, word in enumerate(words[first : first + FEW]):
            number = place << 32 | word % 2**32
            for factor in FACTORS:
                number = number * factor % 2**64
                number ^= number >> 32
            total += number
    return total % 2**64


@pytest.mark.parametrize("size", [0, 1, FEW, FEW + 1, 5 * FEW - 3])
def test_it_is_the_sum_of_words_mixed_with_their_places(monkeypatch, size):
    monkeypatch.setattr(bit_sums, "WORDS", FEW)
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert bit_sum(values).item() % 2**64 == by_hand(values.view(torch.int32).tolist())


def test_half_a_word_is_one_with_zeros_behind_it():
    values = torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)
    low, high, last = (int(one) % 2**16 for one in values.view(torch.int16))
    assert bit_sum(values).item() % 2**64 == by_hand([low | high << 16, last])


# What is added to neighbouring words: nothing to their sum, nor to the sum by places of the last.
BALANCED = {
    "two": (1, -1),
    "three": (1, -2, 1),
    "four": (1, -1, -1, 1),
    "five": (1, 0, -2, 0, 1),
}


@pytest.mark.parametrize("size", [1, 1 << 9, 1 << 16, 1 << 24, 1 << 29])
@pytest.mark.parametrize("change", BALANCED.values(), ids=BALANCED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_that_make_up_for_each_other_are_seen(change, size, dtype):
    values = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(dtype)
    before, words = bit_sum(values), values.view(-1).view(torch.int32)
    added = torch.tensor(change, dtype=torch.int32) * size
    for first in range(len(words) - len(change)):
        words[first : first + len(change)] += added
        assert bit_sum(values) != before
        words[first : first + len(change)] -= added
    assert bit_sum(values) == before


def test_one_bit_of_four_neighbours_that_flips_is_seen():
    """As a line of a bus that is stuck."""
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    before, words = bit_sum(values), values.view(torch.int32)
    for bit in (0, 9, 22, 30):
        for first in range(len(words) - 4):
            words[first : first + 4] ^= 1 << bit
            assert bit_sum(values) != before
            words[first : first + 4] ^= 1 << bit


def test_differences_that_such_changes_leave_are_as_chance_would_have_them():
    """Of 2^20, in each 16 bits of them: chi square within five deviations of what chance has."""
    count, change = 1 << 20, (1 << 16, -(2 << 16), 1 << 16)
    places = torch.arange(count, dtype=torch.int32)
    differences = torch.zeros(count, 1, dtype=torch.int64)
    for place, added in enumerate(change):
        words = torch.full((count,), 0x3F800000, dtype=torch.int32)
        at = places + place
        differences += bit_sums._mixed(words + added, at) - bit_sums._mixed(words, at)
    for shift in (0, 16, 32, 48):
        found = torch.bincount((differences.view(-1) >> shift) & 0xFFFF, minlength=1 << 16)
        chi = (found.double() - 16).square().sum().item() / 16
        assert abs(chi - 65535) < 5 * (2 * 65535) ** 0.5


@pytest.mark.parametrize("other", [1, FEW, 3 * FEW])
def test_words_and_parts_that_change_places_are_seen(monkeypatch, other):
    monkeypatch.setattr(bit_sums, "WORDS", FEW)
    values = torch.randn(4 * FEW)
    before = bit_sum(values)
    assert bit_sum(values.roll(other)) != before
    values[[0, other]] = values[[other, 0]]
    assert bit_sum(values) != before
