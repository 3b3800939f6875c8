"""Launches of the Triton kernels of grouped LoRA. Nothing here waits for the device.

Shape letters as in `op.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from lora_moe_rl.kernels.backend import interpreting
from lora_moe_rl.kernels.grouped_lora import triton_kernels as kernels
from lora_moe_rl.kernels.grouped_lora.torch_path import row_in_site

# Static block sizes, by the bytes of an element of x: (most tokens a tile, N, K of a wide K,
# tokens a step of `outer`). 2 bytes: tensor cores; 4 bytes: no TF32, so registers bind.
_BLOCKS = {2: (128, 128, 64, 64), 4: (64, 64, 32, 32)}
_SMALLEST = 16  # sides of tl.dot
_WARPS, _STAGES = 4, 3
_WIDE_TILE = 64 * 128  # a larger tile does not leave registers enough on four warps
# With more tokens an expert than this, weights are cast to x's dtype once and not by each tile.
_CAST_ONCE = 512
# Tokens of one program of `outer`: four times the mean of an expert, so that a balanced load has no
# partial sums and a heavy expert has many programs.
_CHUNK, _CHUNK_FACTOR, _CHUNK_GROUPS = 512, 4, 64


@dataclass(frozen=True)
class Schedule:
    tiles: torch.Tensor
    slots: torch.Tensor
    num_slots: int


def forward(y, add, x, A, Bs, counts, scales, ranks) -> torch.Tensor:
    """Writes (`add`: adds) the delta into y `[T, sum out]`. Returns x A^T, `[T, R]`."""
    x = _rows(x)
    size = _tile_size(x, counts)
    tiles = _tiles(counts, x.shape[0], size)
    xa = _shrink(x, A, Bs, counts, ranks, tiles, size)
    row = column = 0
    for B, scale in zip(Bs, scales, strict=True):
        out, rank = B.shape[-2:]
        part, target = xa[:, row : row + rank], y[:, column : column + out]
        _matmul(part, _stack(B, counts).mT, target, tiles, size, scale, add=add)
        row, column = row + rank, column + out
    return xa


def backward(dy, x, A, Bs, counts, scales, ranks, xa, needs) -> list[torch.Tensor | None]:
    """dx, dA and dB of each site; `needs`: which of dx, dA, dB are wanted. xa None: computed."""
    needs_x, needs_A, needs_B = needs
    x, dy = _rows(x), _rows(dy)
    size = _tile_size(x, counts)
    tiles = _tiles(counts, x.shape[0], size)
    if xa is None and needs_B:
        xa = _shrink(x, A, Bs, counts, ranks, tiles, size)
    chunks = _Chunks(counts, x.shape[0])
    dxa = x.new_empty(x.shape[0], A.shape[-2]) if needs_x or needs_A else None
    rows = None if ranks is None else row_in_site(Bs, x.device)
    dBs = []
    row = column = 0
    for B, scale in zip(Bs, scales, strict=True):
        out, rank = B.shape[-2:]
        dy_i, site = dy[:, column : column + out], slice(row, row + rank)
        if dxa is not None:
            limits = None if rows is None else (ranks, rows[site])
            _matmul(dy_i, _stack(B, counts), dxa[:, site], tiles, size, scale, limits=limits)
        dBs.append(_outer(xa[:, site], dy_i, B, chunks, scale, transpose=True) if needs_B else None)
        row, column = row + rank, column + out
    dx = dA = None
    if needs_x:
        dx = torch.empty_like(x)
        _matmul(dxa, _stack(A, counts), dx, tiles, size)
    if needs_A:
        dA = _outer(dxa, x, A, chunks)
    return [dx, dA, *dBs]


def _shrink(x, A, Bs, counts, ranks, tiles, size):
    xa = x.new_empty(x.shape[0], A.shape[-2])
    limits = None if ranks is None else (ranks, row_in_site(Bs, x.device))
    _matmul(x, _stack(A, counts).mT, xa, tiles, size, limits=limits)
    return xa


def _matmul(x, w, y, tiles, size, scale=1.0, add=False, limits=None):
    """y[t] (+)= scale * x[t] w[e(t)]: x `[T, K]`, w `[E, K, N]`, y `[T, N]`."""
    T, K = x.shape
    N = w.shape[-1]
    if T * N == 0:
        return
    _, most_n, wide_k, _ = _BLOCKS[x.element_size()]
    if w.dtype != x.dtype and _CAST_ONCE * w.shape[0] < T:
        w = w.to(x.dtype)
    ranks, rows = limits or (tiles, tiles)  # not read without limits
    block_n = _block(N, most_n)
    kernels.matmul[(tiles.shape[0] * triton.cdiv(N, block_n),)](
        x, w, y, tiles, ranks, rows, scale, N, K,
        x.stride(0), *w.stride(), y.stride(0),
        ADD=add, HAS_RANKS=limits is not None, UPCAST=interpreting(),
        BLOCK_T=size, BLOCK_N=block_n, BLOCK_K=_block(K, wide_k),
        num_warps=2 * _WARPS if size * block_n > _WIDE_TILE else _WARPS, num_stages=_STAGES,
    )  # fmt: skip


def _outer(u, v, like, chunks: _Chunks, scale=1.0, transpose=False) -> torch.Tensor:
    """scale * sum_t u[t]^T v[t] by expert (over all tokens where `like` has no experts), in the
    shape and dtype of `like`; transpose: of v[t]^T u[t]."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    if result.numel() == 0:
        return result
    if u.shape[0] == 0:
        return result.zero_()
    plan = chunks.of(shared=like.dim() == 2)
    d = result if like.dim() == 3 else result[None]
    d = d.mT if transpose else d
    M, N = d.shape[-2:]
    _, most_n, _, block_t = _BLOCKS[u.element_size()]
    block_m, block_n = _block(M, 64), _block(N, most_n)
    blocks = (triton.cdiv(N, block_n), triton.cdiv(M, block_m))
    partial = torch.empty(plan.num_slots, M, N, dtype=torch.float32, device=u.device)
    kernels.outer[(plan.tiles.shape[0], *blocks)](
        u, v, d, partial, plan.tiles, scale, M, N,
        u.stride(0), v.stride(0), *d.stride(),
        UPCAST=interpreting(), BLOCK_T=block_t, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if plan.num_slots:
        kernels.outer_reduce[(d.shape[0], *blocks)](
            partial, d, plan.slots, scale, M, N, *d.stride(),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=_WARPS,
        )  # fmt: skip
    return result


class _Chunks:
    """The schedules of `outer`, made when first asked for: by expert, and of all tokens as one."""

    def __init__(self, counts: torch.Tensor, T: int):
        self.counts, self.T, self.made = counts, T, {}

    def of(self, shared: bool) -> Schedule:
        if shared not in self.made:
            counts = self.counts.sum(0, keepdim=True) if shared else self.counts
            self.made[shared] = chunk_schedule(counts, self.T)
        return self.made[shared]


def chunk_schedule(counts: torch.Tensor, T: int) -> Schedule:
    """Chunks of tokens for `outer`. An expert without tokens has an empty one: it writes zeros.
    Tokens of no expert are in none."""
    mean = T // max(counts.shape[0], _CHUNK_GROUPS)
    size = max(_CHUNK, triton.next_power_of_2(_CHUNK_FACTOR * mean))
    # ceil(c / size) of an expert is at most 1 + c / size, and 2 c / size where it is more than 1.
    num_tiles = counts.shape[0] + T // size
    num_slots = 2 * (T // size)
    return Schedule(*_schedule(counts, T, num_tiles, size, empty=1), num_slots)


def _tiles(counts: torch.Tensor, T: int, size: int) -> torch.Tensor:
    """Tiles of at most `size` tokens: an upper bound of their number, the rest marked. Tokens of no
    expert are in tiles as another expert's would be."""
    num_tiles = min(counts.shape[0] + 1, T) + T // size
    return _schedule(counts, T, num_tiles, size, empty=0)[0]


def _schedule(counts, T, num_tiles, size, empty):
    E = counts.shape[0]
    fields = kernels.TILE_FIELDS.value
    tiles = torch.empty(num_tiles, fields, dtype=torch.int32, device=counts.device)
    slots = torch.empty(E, 2, dtype=torch.int32, device=counts.device)
    kernels.schedule[(E + 1,)](
        counts, tiles, slots, E, T, num_tiles,
        E_POW2=triton.next_power_of_2(E), SIZE=size, EMPTY=empty,
    )  # fmt: skip
    return tiles, slots


def _tile_size(x: torch.Tensor, counts: torch.Tensor) -> int:
    """Tokens a tile: about the mean of an expert, so that few tiles are mostly empty."""
    most = _BLOCKS[x.element_size()][0]
    return _block(x.shape[0] // max(counts.shape[0], 1), most)


def _block(size: int, most: int) -> int:
    return min(max(triton.next_power_of_2(size), _SMALLEST), most)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _stack(w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """A shared tensor as one an expert, without a copy."""
    return w if w.dim() == 3 else w.expand(counts.shape[0], *w.shape)
