"""Grouped LoRA in plain torch: `torch._grouped_mm` where it takes the operands, else one matmul an
expert, which copies `counts` to the host.

Products are rounded to x's dtype. Shape letters as in `op.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_GROUPED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
_ALIGNMENT = 16  # bytes that addresses and strides of its operands are multiples of


def forward(y, add, x, A, Bs, counts, scales, ranks) -> torch.Tensor:
    """Writes (`add`: adds) the delta into y `[T, sum out]`. Returns x A^T, `[T, R]`."""
    xa = _shrink(x, A.to(x.dtype), Bs, counts, ranks)
    row = column = 0
    for B, scale in zip(Bs, scales, strict=True):
        out, rank = B.shape[-2:]
        part = grouped(xa[:, row : row + rank], (scale * B).to(x.dtype).mT, counts)
        target = y[:, column : column + out]
        target.add_(part) if add else target.copy_(part)
        row, column = row + rank, column + out
    return xa


def backward(dy, x, A, Bs, counts, scales, ranks, xa, needs) -> list[torch.Tensor | None]:
    """dx, dA and dB of each site; `needs`: which of dx, dA, dB are wanted. xa None: computed."""
    needs_x, needs_A, needs_B = needs
    weight_A = A.to(x.dtype)
    if xa is None and needs_B:
        xa = _shrink(x, weight_A, Bs, counts, ranks)
    dxa, dBs = [], []
    row = column = 0
    for B, scale in zip(Bs, scales, strict=True):
        out, rank = B.shape[-2:]
        dy_i = dy[:, column : column + out]
        weight = (scale * B).to(x.dtype)
        if needs_x or needs_A:
            dxa.append(grouped(dy_i, weight, counts))
        if needs_B:
            dB = outer(dy_i, xa[:, row : row + rank], counts, shared=B.dim() == 2)
            dBs.append((scale * dB.to(B.dtype)).contiguous())
        else:
            dBs.append(None)
        row, column = row + rank, column + out
    dx = dA = None
    if dxa:
        dxa = _masked(torch.cat(dxa, dim=1), Bs, counts, ranks)
        dx = grouped(dxa, weight_A, counts) if needs_x else None
        dA = outer(dxa, x, counts, shared=A.dim() == 2).to(A.dtype) if needs_A else None
    return [dx, dA, *dBs]


def grouped(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`x[t] w[e(t)]`: x `[T, K]`, w `[E, K, N]` or `[K, N]` for all. Returns `[T, N]`."""
    if w.dim() == 2:
        return x @ w
    if not len(x):  # a rank whose experts nobody has chosen
        return x.new_empty(0, w.shape[-1])
    if _aligned(x) and _aligned(w) and _whole(w.shape[-1], x):
        return torch._grouped_mm(x, w, offs=_offsets(counts))
    if x.is_cuda and x.dtype == torch.bfloat16:
        return _padded_grouped_mm(x, w, counts)
    y = x.new_empty(x.shape[0], w.shape[-1])
    for e, tokens in _spans(counts):
        torch.mm(x[tokens], w[e], out=y[tokens])
    return y


def outer(u: torch.Tensor, v: torch.Tensor, counts: torch.Tensor, shared: bool) -> torch.Tensor:
    """`sum_t u[t] v[t]^T` over each expert's tokens: `[E, M, N]`, or over all `[M, N]`."""
    if shared:
        return u.t() @ v
    if not len(u):
        return u.new_zeros(counts.shape[0], u.shape[1], v.shape[1])
    if u.is_cuda and u.dtype == torch.bfloat16:
        return _padded_outer(u, v, counts)
    if _aligned(u) and _aligned(v):
        return torch._grouped_mm(u.t(), v, offs=_offsets(counts))
    result = u.new_zeros(counts.shape[0], u.shape[1], v.shape[1])
    for e, tokens in _spans(counts):
        torch.mm(u[tokens].t(), v[tokens], out=result[e])
    return result


def _padded_grouped_mm(x, w, counts):
    n = w.shape[-1]
    x = _pad(x)
    w = torch.nn.functional.pad(w, (0, -n % 8, 0, x.shape[1] - w.shape[-2]))
    return torch._grouped_mm(x.contiguous(), w.contiguous(), offs=_offsets(counts))[:, :n]


def _padded_outer(u, v, counts):
    m, n = u.shape[1], v.shape[1]
    u, v = _pad(u).contiguous(), _pad(v).contiguous()
    result = torch._grouped_mm(u.t(), v, offs=_offsets(counts))[:, :m, :n]
    # Of an expert without tokens nothing says what is written.
    return torch.where((counts > 0).view(-1, 1, 1), result, 0)


def _pad(x: torch.Tensor) -> torch.Tensor:
    """x with its last side a multiple of 8; itself where it is one (a pad by nothing copies)."""
    missing = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _aligned(x: torch.Tensor) -> bool:
    """Whether `torch._grouped_mm` takes x as an operand."""
    if x.dtype not in _GROUPED_DTYPES.get(x.device.type, ()):
        return False
    *experts, row, column = x.stride()
    rows_or_columns = (column == 1 and _whole(row, x)) or (row == 1 and _whole(column, x))
    return (
        rows_or_columns
        and all(_whole(stride, x) for stride in experts)
        and x.data_ptr() % _ALIGNMENT == 0
    )


def _whole(elements: int, x: torch.Tensor) -> bool:
    return elements * x.element_size() % _ALIGNMENT == 0


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0).to(torch.int32)


def _spans(counts: torch.Tensor):
    """(expert, its tokens) of each expert that has some."""
    start = 0
    for e, count in enumerate(counts.tolist()):
        if count:
            yield e, slice(start, start + count)
        start += count


def _shrink(x, A, Bs, counts, ranks):
    return _masked(grouped(x, A.mT, counts), Bs, counts, ranks)


def _masked(xa, Bs: Sequence[torch.Tensor], counts, ranks):
    """xa with zero where a row of A is beyond its expert's rank."""
    if ranks is None:
        return xa
    rows = row_in_site(Bs, xa.device)
    rank_of_token = torch.repeat_interleave(ranks, counts, output_size=xa.shape[0])
    return torch.where(rows < rank_of_token[:, None], xa, 0)


def row_in_site(Bs: Sequence[torch.Tensor], device) -> torch.Tensor:
    """int32 `[R]`: the number of each row of A within its own site."""
    return torch.cat([torch.arange(B.shape[-1], device=device, dtype=torch.int32) for B in Bs])
