"""Attention with a sink and a sliding window, on `scaled_dot_product_attention`.

A sink is a learnt score of each head that takes part in the softmax and adds nothing to its output
(GPT-OSS): one more key, whose value is zero. Each query gets one more dimension with its head's
sink in it, and of all keys the sink's alone has one there, so that no mask differs by head. It
stands before the others; under a causal mask a query that nobody reads stands before the queries.

In a window of w tokens a query sees its own and the w - 1 before it. Where sequences are longer,
they are cut in blocks of w queries, of which each sees its own and the block before:

    keys       [block b - 1][block b]
    query t    sees the keys t + 1 … t + w of these 2 w
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Fused kernels want heads whose size is a multiple of this.
MULTIPLE = 8


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q `[n, heads, queries, d]`, k and v `[n, kv_heads, keys, d]`; returns
    `[n, heads, queries, d_v]`.

    mask: float `[n, 1, queries, keys]`, added to the scores, 0 for the keys up to a query's own
    and -inf behind; None: causal. window: how many keys a query sees at most. sinks: `[heads]`, in
    the dtype that is computed in.
    """
    if window is not None and window < k.shape[2]:
        if mask is None:
            return _in_blocks(q, k, v, scale, window, sinks)
        mask = _within(mask, window)
    return _whole(q, k, v, scale, mask, sinks)


def _within(mask: torch.Tensor, window: int) -> torch.Tensor:
    """The mask without the keys that are `window` or more before a query's own."""
    seen = mask == 0
    place = torch.arange(mask.shape[-1], device=mask.device)
    return mask.masked_fill(place <= seen.sum(-1, keepdim=True) - 1 - window, float("-inf"))


def _in_blocks(q, k, v, scale: float, window: int, sinks: torch.Tensor | None) -> torch.Tensor:
    length = q.shape[2]
    count = -(-length // window)
    q, k, v = (F.pad(x, (0, 0, 0, count * window - length)) for x in (q, k, v))
    q = q.unflatten(2, (count, window)).transpose(1, 2).flatten(0, 1)
    k, v = (_with_block_before(x, count, window) for x in (k, v))
    mask = _block_mask(count, window, q)
    out = _whole(q, k, v, scale, mask.repeat(q.shape[0] // count, 1, 1, 1), sinks)
    out = out.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
    return out[:, :, :length]


def _with_block_before(x: torch.Tensor, count: int, window: int) -> torch.Tensor:
    """`[n, heads, count * window, d]` -> `[n * count, heads, 2 * window, d]`."""
    before = F.pad(x, (0, 0, window, 0))[:, :, : x.shape[2]]
    pairs = [one.unflatten(2, (count, window)) for one in (before, x)]
    return torch.cat(pairs, dim=3).transpose(1, 2).flatten(0, 1)


def _block_mask(count: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """`[count, 1, window, 2 * window]`, of the dtype and device of `like`."""
    query = torch.arange(window, device=like.device)[:, None]
    key = torch.arange(2 * window, device=like.device)
    seen = (key > query) & (key <= query + window)
    seen = seen.expand(count, 1, -1, -1).clone()
    seen[0] &= key >= window  # before the first block there is none
    return like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def _whole(q, k, v, scale: float, mask: torch.Tensor | None, sinks) -> torch.Tensor:
    width, causal = v.shape[-1], mask is None
    if sinks is not None:
        q, k, v = _with_sink(q, k, v, sinks / scale, causal)
        mask = mask if mask is None else F.pad(mask, (1, 0))
    if q.shape[1] != k.shape[1] and q.is_cuda and q.dtype is torch.float32:
        k, v = _each_head(k, q), _each_head(v, q)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if sinks is None:
        return out
    return out[:, :, 1:, :width] if causal else out[..., :width]


def _each_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values of each head of `q`. None of torch's fused kernels takes fewer of them in
    float32, and without one all scores of a sequence would be kept."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _with_sink(q, k, v, score: torch.Tensor, causal: bool):
    """`score`: what a query times the sink's key is, by head."""
    size = q.shape[-1]
    more = 1 + -(size + 1) % MULTIPLE
    of_sink = score.to(q.dtype)[:, None, None].expand(q.shape[0], -1, q.shape[2], 1)
    q = torch.cat([q, of_sink, q.new_zeros(*q.shape[:-1], more - 1)], dim=-1)
    if causal:
        q = F.pad(q, (0, 0, 1, 0))
    first = k.new_zeros(*k.shape[:2], 1, size + more)
    first[..., size] = 1
    k = torch.cat([first, F.pad(k, (0, more))], dim=2)
    return q, k, F.pad(v, (0, size + more - v.shape[-1], 1, 0))
