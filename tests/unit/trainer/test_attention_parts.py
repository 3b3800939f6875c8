"""Attention with sinks and windows, against transformers' of GPT-OSS, values and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from lora_moe_rl.trainer.attention_parts import attend

HEADS, KV_HEADS, SIZE, SCALE = 6, 2, 12, 12**-0.5


def inputs(count: int, queries: int, keys: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys))
    return [
        torch.randn(count, *shape, SIZE, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ] + [torch.randn(HEADS, dtype=torch.float64, requires_grad=True)]


def masked(queries: int, keys: int, window: int | None) -> torch.Tensor:
    """Of the last `queries` tokens of sequences of so many `keys`."""
    at, key = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    seen = (key <= at) & (key > at - (window or keys))
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))


def reference(q, k, v, sinks, window):
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, sinks=sinks, training=False)
    mask = masked(q.shape[2], k.shape[2], window)
    return eager_attention_forward(module, q, k, v, mask, SCALE)[0].transpose(1, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("window", [None, 1, 4, 8, 21, 30])
@pytest.mark.parametrize("length", [1, 8, 21])
def test_whole_sequences(length, window):
    q, k, v, sinks = inputs(3, length, length)
    check(attend(q, k, v, SCALE, None, window, sinks), q, k, v, sinks, window)


@pytest.mark.parametrize("window", [None, 1, 4, 8, 21])
def test_what_follows_a_prompt_that_another_sequence_feeds(window):
    """Fewer queries than keys, and a mask that says which keys each sees."""
    q, k, v, sinks = inputs(3, 8, 21)
    mask = masked(8, 21, None).expand(3, 1, -1, -1)
    check(attend(q, k, v, SCALE, mask, window, sinks), q, k, v, sinks, window)


def check(ours, q, k, v, sinks, window):
    theirs = reference(q, k, v, sinks, window)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weight = torch.randn_like(theirs)
    gradients = [torch.autograd.grad((x * weight).sum(), (q, k, v, sinks)) for x in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def test_a_window_without_sinks():
    q, k, v, _ = inputs(2, 21, 21)
    none = torch.full((HEADS,), float("-inf"), dtype=torch.float64)
    theirs = reference(q, k, v, none, 4)
    torch.testing.assert_close(attend(q, k, v, SCALE, None, 4, None), theirs, rtol=0, atol=1e-12)
