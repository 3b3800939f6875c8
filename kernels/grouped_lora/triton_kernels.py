"""The Triton kernels of grouped LoRA. Accumulation is float32; there are no atomics, so that equal
inputs give equal bits.

    schedule      counts -> tiles of tokens that belong to one expert each, on the device
    matmul        y[t] (+)= scale * x[t] w[e(t)], one tile a program
    outer         d[e] = scale * sum of u[t]^T v[t] over e's tokens, one chunk of tokens a program
    outer_reduce  d[e] of an expert with several chunks: their sum, in order
"""

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(4)  # expert, first token, end, slot (-1: the only one)
NO_TILE = tl.constexpr(-1)  # in the place of an expert
NO_EXPERT = tl.constexpr(-2)  # of tokens beyond the last expert's


@triton.jit
def schedule(
    counts,
    tiles,
    slots,
    E,
    T,
    num_tiles,
    E_POW2: tl.constexpr,
    SIZE: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Tiles of at most SIZE tokens. counts int `[E]`, tiles int32 `[num_tiles, 4]`, slots int32
    `[E, 2]`: first slot and number of slots of an expert with several tiles, else (0, 0).
    EMPTY is 1 where an expert without tokens gets an (empty) tile, else 0. Counts below 0 are 0,
    and none goes beyond T, so that no more tiles and slots are written than T has room for.
    Grid: E + 1, the last program marks tokens of no expert, and tiles that are not needed."""
    e = tl.program_id(0)
    index = tl.arange(0, E_POW2)
    count = tl.maximum(tl.load(counts + index, mask=index < E, other=0).to(tl.int64), 0)
    ends = tl.cumsum(count, axis=0)
    count = (tl.minimum(ends, T) - tl.minimum(ends - count, T)).to(tl.int32)
    needed = (count + SIZE - 1) // SIZE
    needed = tl.where(index < E, tl.maximum(needed, EMPTY), 0)
    first_tile = tl.sum(tl.where(index < e, needed, 0), axis=0)
    if e < E:
        first_slot = tl.sum(tl.where((index < e) & (needed > 1), needed, 0), axis=0)
        start = tl.sum(tl.where(index < e, count, 0), axis=0)
        mine = tl.sum(tl.where(index == e, needed, 0), axis=0)
        end = start + tl.sum(tl.where(index == e, count, 0), axis=0)
        several = mine > 1
        tl.store(slots + 2 * e, tl.where(several, first_slot, 0))
        tl.store(slots + 2 * e + 1, tl.where(several, mine, 0))
        for i in range(mine):
            tile = tiles + (first_tile + i) * TILE_FIELDS
            tl.store(tile, e)
            tl.store(tile + 1, start + i * SIZE)
            tl.store(tile + 2, tl.minimum(start + (i + 1) * SIZE, end))
            tl.store(tile + 3, tl.where(several, first_slot + i, -1))
    else:
        given = tl.sum(count, axis=0)
        for i in range(first_tile, num_tiles):
            tile = tiles + i * TILE_FIELDS
            start = given + (i - first_tile) * SIZE
            tl.store(tile, tl.where(start < T, NO_EXPERT, NO_TILE))
            tl.store(tile + 1, start)
            tl.store(tile + 2, tl.minimum(start + SIZE, T))


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """Float32 operands are multiplied as float32, not as TF32. UPCAST: the interpreter multiplies
    the bits of bfloat16."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def matmul(
    x,
    w,
    y,
    tiles,
    ranks,
    row_in_site,
    scale,
    N,
    K,
    stride_xt,
    stride_we,
    stride_wk,
    stride_wn,
    stride_yt,
    ADD: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x `[T, K]`, y `[T, N]`, their last stride 1; w `[E, K, N]` of any strides and dtype.
    HAS_RANKS: column n of y is zero for experts with ranks[e] <= row_in_site[n]. Tokens of no
    expert get zeros.
    Grid: tiles * blocks of N."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    tile = tiles + (pid // blocks_n) * TILE_FIELDS
    e = tl.load(tile)
    if e == NO_TILE:
        return
    reach = tl.where(e < 0, 0, K)
    e = tl.maximum(e, 0)
    t = tl.load(tile + 1) + tl.arange(0, BLOCK_T)
    t_mask = (t < tl.load(tile + 2))[:, None]
    t = t.to(tl.int64)[:, None]  # T * K can exceed 2^31
    n = (pid % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = (n < N)[None, :]
    w += e.to(tl.int64) * stride_we
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, reach, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(x + t * stride_xt + k[None, :], mask=t_mask & (k < K)[None, :], other=0.0)
        w_ptrs = w + k[:, None] * stride_wk + n[None, :] * stride_wn
        b = tl.load(w_ptrs, mask=(k < K)[:, None] & n_mask, other=0.0)
        acc = _dot(a, b.to(a.dtype), acc, UPCAST)
    acc *= scale
    if HAS_RANKS:
        row = tl.load(row_in_site + n, mask=n < N, other=0)
        acc = tl.where((row < tl.load(ranks + e))[None, :], acc, 0.0)
    y_ptrs = y + t * stride_yt + n[None, :]
    if ADD:
        acc += tl.load(y_ptrs, mask=t_mask & n_mask, other=0.0).to(tl.float32)
    tl.store(y_ptrs, acc.to(y.dtype.element_ty), mask=t_mask & n_mask)


@triton.jit
def outer(
    u,
    v,
    d,
    partial,
    tiles,
    scale,
    M,
    N,
    stride_ut,
    stride_vt,
    stride_de,
    stride_dm,
    stride_dn,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """u `[T, M]`, v `[T, N]`, their last stride 1; d `[E, M, N]` of any strides; partial float32
    `[slots, M, N]` takes the sums of experts with several tiles.
    Grid: (tiles, blocks of N, blocks of M)."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    e = tl.load(tile)
    if e < 0:
        return
    start = tl.load(tile + 1)
    end = tl.load(tile + 2)
    slot = tl.load(tile + 3)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask = m < M
    n_mask = (n < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for t0 in range(start, end, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        t_mask = t < end
        t = t.to(tl.int64)
        a_ptrs = u + t[None, :] * stride_ut + m[:, None]
        a = tl.load(a_ptrs, mask=m_mask[:, None] & t_mask[None, :], other=0.0)
        b_ptrs = v + t[:, None] * stride_vt + n[None, :]
        b = tl.load(b_ptrs, mask=t_mask[:, None] & n_mask, other=0.0)
        acc = _dot(a, b, acc, UPCAST)
    mask = m_mask[:, None] & n_mask
    if slot < 0:
        d_ptrs = d + e.to(tl.int64) * stride_de + m[:, None] * stride_dm + n[None, :] * stride_dn
        tl.store(d_ptrs, (acc * scale).to(d.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + slot.to(tl.int64) * M * N + m[:, None] * N + n[None, :], acc, mask=mask)


@triton.jit
def outer_reduce(
    partial,
    d,
    slots,
    scale,
    M,
    N,
    stride_de,
    stride_dm,
    stride_dn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (E, blocks of N, blocks of M)."""
    e = tl.program_id(0).to(tl.int64)
    num_slots = tl.load(slots + 2 * e + 1)
    if num_slots == 0:
        return
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (m < M) & (n < N)
    first_slot = tl.load(slots + 2 * e).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(num_slots):
        acc += tl.load(partial + (first_slot + i) * M * N + m * N + n, mask=mask, other=0.0)
    d_ptrs = d + e * stride_de + m * stride_dm + n * stride_dn
    tl.store(d_ptrs, (acc * scale).to(d.dtype.element_ty), mask=mask)
