"""vLLM's flash-attention, and its own attention in Triton, in torch."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch

from host_cuda.operators import on_host


def install_triton(module: ModuleType) -> None:
    module.unified_attention = unified_attention  # type: ignore[attr-defined]


def install(module: ModuleType) -> None:
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.get_scheduler_metadata = (  # type: ignore[attr-defined]
        lambda *_, **__: torch.zeros(1, dtype=torch.int32).to("cuda")
    )


def _host(value: Any) -> Any:
    return on_host(value) if isinstance(value, torch.Tensor) else value


def _keys(i, k, v, ends, used, block_table) -> tuple[torch.Tensor, torch.Tensor]:
    """Of sequence i, packed or in pages."""
    if block_table is None:
        return k[ends[i] : ends[i + 1]], v[ends[i] : ends[i + 1]]
    pages = block_table[i, : -(-used[i] // k.shape[1])].long()
    return k[pages].flatten(0, 1)[: used[i]], v[pages].flatten(0, 1)[: used[i]]


def _seen(queries: int, keys: int, causal: bool, left: int) -> torch.Tensor:
    at = torch.arange(queries)[:, None] + keys - queries
    of = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= of <= at
    return seen & (of >= at - left) if left >= 0 else seen


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
    q_v=None, softmax_scale=None, causal=False, window_size=None, softcap=0.0, block_table=None,
    return_softmax_lse=False, out=None, s_aux=None, **_,
):  # fmt: skip
    """Queries `[tokens, heads, d]`; keys and values packed, or `[pages, page, heads, d]`. `q_v`:
    queries of the values, `s_aux`: a sink for each head."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    device, (q, k, v, q_v, s_aux) = q.device, map(_host, (q, k, v, q_v, s_aux))
    table = _host(block_table)
    ends, ends_k, used = (
        None if one is None else _host(one).tolist()
        for one in (cu_seqlens_q, cu_seqlens_k, seqused_k)
    )
    left, right = (-1, -1) if window_size is None else window_size
    result = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"))
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        keys, values = (
            one.float().repeat_interleave(q.shape[1] // one.shape[1], 1)
            for one in _keys(i, k, v, ends_k, used, table)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys)
        if q_v is not None:
            scores += torch.einsum("qhd,khd->hqk", q_v[start:end].float(), values)
        scores *= scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        seen = _seen(end - start, len(keys), causal or right == 0, left)
        scores = scores.masked_fill(~seen, float("-inf"))
        total = lse[:, start:end] = scores.logsumexp(-1)
        if s_aux is not None:
            total = torch.logaddexp(total, s_aux.float()[:, None])
        shares = torch.exp(scores - total[..., None])
        result[start:end] = torch.einsum("hqk,khd->qhd", shares, values).to(result.dtype)
    if out is None:
        out = torch.empty(result.shape, dtype=result.dtype, device=device)
    _host(out).copy_(result)
    return (out, lse.to(device)) if return_softmax_lse else out


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
    window_size, block_table, softcap, *_, sinks=None, chunk_lookback=-1, **more,
):  # fmt: skip
    """vLLM's kernel in Triton, which float32 has: in its interpreter half of an engine's time."""
    unknown = ("alibi_slopes", "output_scale", "qq_bias", "mm_prefix_range", "rswa_prefix_lens")
    assert chunk_lookback == -1 and all(more.get(name) is None for name in unknown), more
    flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=seqused_k,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        block_table=block_table, out=out, s_aux=sinks,
    )  # fmt: skip
