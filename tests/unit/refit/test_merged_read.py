"""vLLM's own linears read back: whatever their cut and their packed form, what they hold is told to
the last bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm_linears import worker

from lora_moe_rl.errors import RefitError

pytestmark = pytest.mark.seconds  # imports vLLM
HIDDEN, HEAD, HEADS = 48, 8, 4


def qkv(linear, dtype, kv_heads: int, bias: bool):
    return linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, kv_heads, bias=bias, params_dtype=dtype), [
        HEADS * HEAD,
        kv_heads * HEAD,
        kv_heads * HEAD,
    ]


CASES = {
    "qkv": lambda linear, dtype: qkv(linear, dtype, 2, True),
    "qkv, one key head": lambda linear, dtype: qkv(linear, dtype, 1, True),
    "gate and up": lambda linear, dtype: (
        linear.MergedColumnParallelLinear(HIDDEN, [24, 24], bias=False, params_dtype=dtype),
        [24, 24],
    ),
    "o_proj": lambda linear, dtype: (
        linear.RowParallelLinear(HIDDEN, 40, bias=False, params_dtype=dtype), [40]
    ),
    "kv_a_proj": lambda linear, dtype: (
        linear.ReplicatedLinear(HIDDEN, 20, bias=False, params_dtype=dtype), [20]
    ),
    "q_a and kv_a": lambda linear, dtype: (
        linear.MergedColumnParallelLinear(
            HIDDEN, [16, 20], bias=False, params_dtype=dtype, disable_tp=True
        ),
        [16, 20],
    ),
}  # fmt: skip


def load(layer, values: list[torch.Tensor], kind: str) -> None:
    """By vLLM's own loader of the layer's weight or bias."""
    parameter = getattr(layer, kind)
    loader = parameter.weight_loader
    if len(values) == 1:
        loader(parameter, values[0])
    else:
        shards = ("q", "k", "v") if len(values) == 3 else range(len(values))
        for value, shard in zip(values, shards, strict=True):
            loader(parameter, value, shard)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_every_worker_tells_what_a_linear_holds_to_the_last_bit(name, dtype, monkeypatch):
    from lora_moe_rl.refit import merged_read

    monkeypatch.setattr(merged_read, "ROWS", 20)  # several pieces, the last one smaller
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        with worker(monkeypatch, rank, ranks) as linear:
            layer, sizes = CASES[name](linear, dtype)
        draw = torch.Generator().manual_seed(rank)
        weights = [torch.randn(size, HIDDEN, generator=draw).to(dtype) for size in sizes]
        load(layer, weights, "weight")
        biases = []
        if layer.bias is not None:
            biases = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
            load(layer, biases, "bias")
        layer.quant_method.process_weights_after_loading(layer)
        local = merged_read.local_weight(layer, weights)
        assert merged_read.computes(layer, local) and merged_read.adds(layer, biases, dtype)
        for wrong in (next_number(local), torch.full_like(local, torch.nan), local.flip(0)):
            assert not merged_read.computes(layer, wrong)
        if biases:
            others = [*biases[:-1], biases[-1].flip(0)]
            assert not merged_read.adds(layer, others, dtype)
            assert not merged_read.adds(layer, [], dtype)


def next_number(values: torch.Tensor) -> torch.Tensor:
    """With the last bit of the last one changed."""
    other = values.clone()
    bits = other.view(torch.int32 if values.dtype == torch.float32 else torch.int16)
    bits[(-1,) * bits.dim()] ^= 1
    return other


def test_parts_that_do_not_make_up_the_whole_are_refused():
    from lora_moe_rl.refit.merged_read import share

    whole = torch.arange(12).view(6, 2)
    assert share(whole, 0, 3, 1, 2).tolist() == whole[3:].tolist()
    assert share(whole, 0, 3, 1, 4).tolist() == whole[:3].tolist()  # two workers hold each
    for size, ranks in ((4, 2), (2, 2), (9, 1)):
        with pytest.raises(RefitError, match=f"{ranks} workers cannot hold .* parts of {size}"):
            share(whole, 0, size, 0, ranks)


def test_the_halves_of_kv_b_that_attention_holds_are_looked_at_too():
    """Split as vLLM splits them."""
    from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from lora_moe_rl.refit.merged_read import absorbs

    heads, nope, v, rank = 3, 5, 4, 7
    weight = torch.randn(heads * (nope + v), rank, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.quant_method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)
    keys, values = split_kv_b_proj(layer, torch.float32, rank, heads, nope, v)

    def attention(keys, values):
        return SimpleNamespace(
            W_UK_T=keys.permute(1, 2, 0), W_UV=values.transpose(0, 1), num_heads=heads,
            qk_nope_head_dim=nope, v_head_dim=v, kv_lora_rank=rank,
        )  # fmt: skip

    assert absorbs(attention(keys, values), weight)
    for stale in (attention(keys + 1, values), attention(keys, values + 1)):
        assert not absorbs(stale, weight)
