"""Errors of kernels against float64, by which `bench base` judges torch's beside vLLM's."""

from __future__ import annotations

import pytest
import torch

from lora_moe_rl.bench.base import MOST_ERROR
from lora_moe_rl.bench.own_base import _squared_error

NONE = torch.empty(0)  # of a kernel that has packed its weight


def error(kernel, packed=NONE) -> float:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    return _squared_error(kernel(weight), packed, weight) ** 0.5


def plain(weight):
    return lambda x, w, bias: torch.nn.functional.linear(x, weight)


def test_a_kernel_is_judged_by_what_it_has_packed_or_by_what_it_is_given():
    assert 0 < error(plain) < 1e-6
    given = torch.zeros(48, 256)
    assert error(lambda weight: lambda x, w, bias: x @ w.t(), given) == pytest.approx(1)


def test_a_kernel_that_rounds_to_fewer_bits_lies_far_outside():
    def rounded(weight):
        return lambda x, w, bias: (x.bfloat16() @ weight.bfloat16().t()).float()

    assert error(rounded) > 1000 * MOST_ERROR * error(plain)
