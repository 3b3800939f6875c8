"""vLLM's own CUDA operators: what each does, in torch. Those that tiny models of the tested
families come to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from host_cuda.operators import on_host

_libraries: list[torch.library.Library] = []


def _host(value: Any) -> Any:
    return on_host(value) if isinstance(value, Tensor) and value.device.type == "cuda" else value


def rms_norm(result, input, weight, epsilon) -> None:
    result, input, weight = map(_host, (result, input, weight))
    x = input.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    x = x.to(input.dtype)
    result.copy_(x if weight is None else x * weight)


def fused_add_rms_norm(input, residual, weight, epsilon) -> None:
    residual_ = _host(residual)
    residual_.add_(_host(input))
    rms_norm(input, residual, weight, epsilon)


def rotary_embedding(
    positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False
) -> None:
    assert rope_dim_offset == 0 and not inverse
    positions, cache = _host(positions).flatten(), _host(cos_sin_cache)
    cos, sin = cache[positions].float().chunk(2, -1)
    for tensor in (query, key):
        if tensor is None:
            continue
        x = _host(tensor).view(len(positions), -1, head_size)[..., : cache.shape[1]]
        cos_, sin_ = cos[:, None], sin[:, None]
        if is_neox:
            a, b = (one.float() for one in x.chunk(2, -1))
            x.copy_(torch.cat([a * cos_ - b * sin_, b * cos_ + a * sin_], -1))
        else:
            a, b = x[..., ::2].float(), x[..., 1::2].float()
            x.copy_(torch.stack([a * cos_ - b * sin_, b * cos_ + a * sin_], -1).flatten(-2))


def vocab_parallel_embedding(
    result, input_ids, weight, first, end, padding, first_added, end_added
) -> None:
    """The rows of this rank's part of the vocabulary, 0 for tokens of others."""
    ids, weight = _host(input_ids).long(), _host(weight)
    own, added = (ids >= first) & (ids < end), (ids >= first_added) & (ids < end_added)
    behind = end - first + padding - first_added
    places = torch.where(own, ids - first, torch.where(added, ids + behind, 0))
    _host(result).copy_(weight[places] * (own | added)[:, None])


def silu_and_mul(result, input) -> None:
    gate, up = _host(input).chunk(2, -1)
    _host(result).copy_(torch.nn.functional.silu(gate.float()).to(gate.dtype) * up)


def swigluoai_and_mul(result, input, alpha=1.702, limit=7.0) -> None:
    x = _host(input).float()
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    _host(result).copy_((up + 1) * gate * torch.sigmoid(gate * alpha))


def _top(scores, weights_of, result, indices, places, renormalize, bias, factor=1.0) -> None:
    chosen = scores if bias is None else scores + _host(bias)
    k = indices.shape[1]
    found = chosen.topk(k, -1).indices
    weights = weights_of.gather(-1, found)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    _host(result).copy_(weights * factor)
    _host(indices).copy_(found)
    rows = len(found)
    _host(places).copy_(torch.arange(rows)[:, None] + torch.arange(k) * rows)


def topk_softmax(result, indices, places, gating, renormalize, bias, is_padding) -> None:
    scores = _host(gating).float().softmax(-1)
    _top(scores, scores, result, indices, places, renormalize, bias)


def topk_sigmoid(
    result, indices, places, gating, renormalize, bias, routed_scaling_factor, is_padding
) -> None:
    scores = _host(gating).float().sigmoid()
    _top(scores, scores, result, indices, places, renormalize, bias, routed_scaling_factor)


def grouped_topk(
    scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func
):
    logits = _host(scores).float()
    scores = logits.sigmoid() if scoring_func == 1 else logits
    chosen = scores + _host(bias).float()
    rows = len(scores)
    groups = chosen.view(rows, n_group, -1).topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(topk_group, -1).indices, 1)
    mask = kept.repeat_interleave(chosen.shape[1] // n_group, 1).bool()
    found = chosen.masked_fill(~mask, float("-inf")).topk(topk, -1).indices
    weights = scores.gather(-1, found)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routed_scaling_factor
    return weights.to("cuda"), found.to(torch.int32).to("cuda")


def _align(topk_ids, mask, num_experts, block, sorted_, experts, padded, expert_map) -> None:
    flat = topk_ids.flatten().tolist()
    sorted_.fill_(len(flat))
    buckets: list[list[int]] = [[] for _ in range(num_experts)]
    for place, expert in enumerate(flat):
        if mask[place]:
            buckets[expert].append(place)
    at = 0
    for expert, places in enumerate(buckets):
        local = expert if expert_map is None else int(expert_map[expert])
        if expert_map is not None and local < 0:
            continue
        blocks = -(-len(places) // block)
        sorted_[at : at + len(places)] = torch.tensor(places, dtype=torch.int32)
        experts[at // block : at // block + blocks] = local
        at += blocks * block
    padded.fill_(at)


def moe_align_block_size(
    topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad,
    maybe_expert_map, scatter_idx=None,
) -> None:  # fmt: skip
    assert scatter_idx is None
    ids, experts = _host(topk_ids), _host(experts_ids)
    experts.fill_(-1 if maybe_expert_map is not None else 0)
    _align(
        ids, [True] * ids.numel(), num_experts, block_size, _host(sorted_token_ids), experts,
        _host(num_tokens_post_pad), _host(maybe_expert_map),
    )  # fmt: skip


def moe_lora_align_block_size(
    topk_ids, token_lora_mapping, num_experts, block_size, max_loras, max_num_tokens_padded,
    max_num_m_blocks, sorted_token_ids, experts_ids, num_tokens_post_pad, adapter_enabled,
    lora_ids, maybe_expert_map,
) -> None:  # fmt: skip
    ids, mapping, enabled = _host(topk_ids), _host(token_lora_mapping), _host(adapter_enabled)
    sorted_ = _host(sorted_token_ids).view(max_loras, max_num_tokens_padded)
    experts = _host(experts_ids).view(max_loras, max_num_m_blocks)
    for lora in _host(lora_ids).tolist():
        if lora < 0 or not enabled[lora]:
            continue
        mask = (mapping[: len(ids)] == lora).repeat_interleave(ids.shape[1]).tolist()
        padded = _host(num_tokens_post_pad)[lora : lora + 1]
        _align(
            ids, mask, num_experts, block_size, sorted_[lora], experts[lora], padded,
            _host(maybe_expert_map),
        )  # fmt: skip


def moe_sum(input, output, topk_ids=None, expert_map=None) -> None:
    _host(output).copy_(_host(input).float().sum(1))


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale) -> None:
    slots, cache = _host(slot_mapping).long(), _host(kv_cache)
    taken = slots >= 0
    rows = torch.cat([_host(kv_c), _host(k_pe).flatten(1)], -1)[: len(slots)][taken]
    slots = slots[taken]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows.to(cache.dtype)


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
) -> None:
    slots = _host(slot_mapping).long()
    taken = slots >= 0
    for rows, cache in ((_host(key), _host(key_cache)), (_host(value), _host(value_cache))):
        at = slots[taken]
        cache[at // cache.shape[1], at % cache.shape[1]] = rows[: len(slots)][taken]


OPERATORS = {
    "_C_cache_ops": (concat_and_cache_mla, reshape_and_cache_flash),
    "_C": (
        rms_norm, fused_add_rms_norm, rotary_embedding, silu_and_mul, swigluoai_and_mul,
        vocab_parallel_embedding,
    ),
    "_moe_C": (
        topk_softmax, topk_sigmoid, grouped_topk, moe_align_block_size, moe_lora_align_block_size,
        moe_sum,
    ),
}  # fmt: skip


def install() -> None:
    """Once vLLM's libraries are loaded."""
    for space, functions in OPERATORS.items():
        library = torch.library.Library(space, "IMPL")
        for function in functions:
            library.impl(function.__name__, function, "CUDA", allow_override=True)
        _libraries.append(library)
