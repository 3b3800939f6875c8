"""Settings of parts that others have too, by hand; test_oracles.py compares them."""

from __future__ import annotations

import pytest
import torch
from packed_tokens import tokens_of

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override


def made(*settings: str):
    return algorithms.make(override(RunConfig(), list(settings)))


def test_tokens_that_the_dual_clip_holds_are_counted():
    """Ratios of 4 and 2 under a negative advantage and of 4 under a positive one: the first has no
    gradient, and the last none by the ordinary clip."""
    logprobs = torch.tensor([4.0, 2.0, 4.0]).log().requires_grad_()
    tokens = tokens_of(logprobs, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]))
    found = made("algorithm.dual_clip=3").loss(tokens)
    found.values.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0, 2, 0])
    assert found.metrics["clipped_dual"].tolist() == [1, 0, 0]
    assert found.metrics["clipped_high"].tolist() == [0, 0, 1]
    assert "clipped_dual" not in made().loss(tokens).metrics
