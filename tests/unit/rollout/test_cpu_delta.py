"""A delta net on vLLM's CPU build in float32: the states of requests, with vLLM's own views of its
cache. What it computes of a whole model: tests/integration/test_families_engine.py."""

from __future__ import annotations

from types import MethodType, SimpleNamespace

import pytest
import torch

from lora_moe_rl.rollout import cpu_delta

HEADS, KEY_HEADS, KEY, VALUE, WIDTH, SLOTS = 4, 2, 8, 6, 4, 5
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE


def make_layer() -> SimpleNamespace:
    """With a cache that other requests have left full."""
    # Here, so that nothing of vLLM's model code is imported when tests are collected.
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention as Layer,
    )

    torch.manual_seed(0)
    layer = SimpleNamespace(
        prefix="layer",
        tp_size=1,
        key_dim=KEY_HEADS * KEY,
        value_dim=HEADS * VALUE,
        head_k_dim=KEY,
        head_v_dim=VALUE,
        A_log=torch.randn(HEADS) - 2,
        dt_bias=torch.randn(HEADS),
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH), bias=None),
        kv_cache=(
            torch.randn(SLOTS, WIDTH - 1, CHANNELS),
            torch.randn(SLOTS, HEADS, VALUE, KEY),
        ),
    )
    layer.rearrange_mixed_qkv = MethodType(Layer.rearrange_mixed_qkv, layer)
    return layer


def step(layer, inputs, monkeypatch, lengths, slots, goes_on, decodes=0):
    """One call of the operator: requests of so many tokens each."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    metadata = SimpleNamespace(
        num_actual_tokens=sum(lengths),
        num_decodes=decodes,
        num_prefills=len(lengths) - decodes,
        spec_sequence_masks=None,
        non_spec_query_start_loc=starts,
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
        has_initial_state=torch.tensor(goes_on),
    )
    context = SimpleNamespace(no_compile_layers={"layer": layer}, attn_metadata={"layer": metadata})
    monkeypatch.setattr(cpu_delta, "get_forward_context", lambda: context)
    out = torch.empty(sum(lengths), HEADS, VALUE)
    cpu_delta.cpu_gdn_attention_core(*inputs, out, "layer")
    return out


def tokens(count: int):
    return torch.randn(count, CHANNELS), torch.randn(count, HEADS), torch.randn(count, HEADS)


def test_requests_go_on_from_their_own_states_and_begin_from_none(monkeypatch):
    layer = make_layer()
    first, second = tokens(9), tokens(6)
    whole = [step(make_layer(), x, monkeypatch, [len(x[0])], [3], [False]) for x in (first, second)]
    both = tuple(torch.cat([a[:7], b[:5]]) for a, b in zip(first, second, strict=True))
    begun = step(layer, both, monkeypatch, [7, 5], [1, 4], [False, False])
    torch.testing.assert_close(begun, torch.cat([whole[0][:7], whole[1][:5]]))
    # The second samples a token while a third begins where the first one's state is not.
    third = tokens(3)
    mixed = tuple(torch.cat([b[5:6], c]) for b, c in zip(second, third, strict=True))
    found = step(layer, mixed, monkeypatch, [1, 3], [4, 2], [True, False], decodes=1)
    torch.testing.assert_close(found[:1], whole[1][5:], atol=1e-5, rtol=1e-5)
    alone = step(make_layer(), third, monkeypatch, [3], [3], [False])
    torch.testing.assert_close(found[1:], alone)
    rest = tuple(a[7:] for a in first)
    found = step(layer, rest, monkeypatch, [2], [1], [True])
    torch.testing.assert_close(found, whole[0][7:], atol=1e-5, rtol=1e-5)


def test_a_state_that_nobody_has_is_left_alone(monkeypatch):
    layer = make_layer()
    before = [cache.clone() for cache in layer.kv_cache]
    step(layer, tokens(4), monkeypatch, [4], [2], [False])
    for cache, was in zip(layer.kv_cache, before, strict=True):
        assert torch.equal(cache[[0, 1, 3, 4]], was[[0, 1, 3, 4]])
        assert not torch.equal(cache[2], was[2])


def test_speculative_decoding_is_refused(monkeypatch):
    layer = make_layer()
    monkeypatch.setattr(
        cpu_delta,
        "get_forward_context",
        lambda: SimpleNamespace(
            no_compile_layers={"layer": layer},
            attn_metadata={
                "layer": SimpleNamespace(num_actual_tokens=1, spec_sequence_masks=torch.ones(1))
            },
        ),
    )
    with pytest.raises(RuntimeError, match="knows no speculative decoding"):
        cpu_delta.cpu_gdn_attention_core(*tokens(1), torch.empty(1, HEADS, VALUE), "layer")
