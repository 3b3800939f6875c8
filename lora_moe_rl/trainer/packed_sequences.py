"""Where the tokens of a micro-batch stand for attention, which takes right-padded batches.

Sequences of about a length are a batch: where one is long and others are short, each kind is
attended to in a call of its own, so that the short ones are not padded to the long one.

Every sequence is fed whole, but for prompts that another one feeds (`data/alike.py`). Those whose
prompt is their own are causal batches. What follows a prompt of another one is in other batches:

    queries    b0 b1                of the tokens fed
    keys       p0 p1 p2 b0 b1       p0 to p2 of the sequence that feeds them
    mask       each query sees the keys up to its own
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from lora_moe_rl.data.packing import MicroBatch
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.trainer.device import Device

# Of a mask, which all layers share; where it would have more, queries are padded as keys are.
MOST_MASKED = 2**26
# What a further call costs, in pairs of a query and a key: by arithmetic, of some ten kernels on a
# GPU and 32 heads of 128.
CALL = 2**20


@dataclass
class PaddedBatch:
    """Some sequences as attention sees them.

    tokens: int64 `[n]`, the tokens fed whose queries are here; None: all of them. index: int64
    `[n]`, where each stands in the batch of queries, whose shape is (sequences, longest). keys:
    int64 `[sequences * longest of keys]`, the token fed whose key and value stand at each place;
    None: those of the queries. mask: float `[sequences, 1, longest, longest of keys]`, added to the
    scores; None: a query sees the keys up to its own place.
    """

    tokens: torch.Tensor | None
    index: torch.Tensor
    shape: tuple[int, int]
    keys: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass
class PackedParams(PackedSeqParams):
    """For the local modules. cu_seqlens_q and cu_seqlens_kv hold the positions of the tokens that
    this rank is fed, int64 `[F / cp]`, which is all that the rotary embedding makes of them. The
    batches are of all F that are fed; `order`: int64 `[F]`, the place of each token among those
    of all batches in turn; None for one batch."""

    batches: list[PaddedBatch] = field(default_factory=list)
    order: torch.Tensor | None = None


def packed_params(data: MicroBatch, device: Device, mine: slice) -> PackedSeqParams:
    """`mine`: which of the tokens fed this rank is fed (context parallelism). Raises ConfigError
    for prompts that are fed once where attention cannot have it."""
    on, longest = device.torch_device, data.max_seqlen
    if device.transformer_engine:
        if data.shares:
            raise ConfigError(
                "trainer.share_prompts=on, and Transformer Engine's attention has as many keys as "
                "queries; set trainer.share_prompts=off"
            )
        ends = as_tensor(data.cu_seqlens, on)
        return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = as_tensor(data.positions[data.fed][mine], on)
    params = PackedParams("thd", positions, positions, max_seqlen_q=longest, max_seqlen_kv=longest)
    sequence = np.repeat(np.arange(len(data.cu_seqlens) - 1), np.diff(data.cu_seqlens))
    lengths, follows = np.diff(data.cu_seqlens), np.zeros(len(data.cu_seqlens) - 1, bool)
    follows[sequence[np.setdiff1d(np.arange(len(sequence)), data.fed, assume_unique=True)]] = True
    own = of_a_length(lengths, ~follows)
    if len(own) == 1 and not data.shares:
        params.batches = [_whole(data, sequence, None, on)]
        return params
    params.batches = [_whole(data, sequence, which, on) for which in own]
    for which in of_a_length(lengths, follows):
        later = _following(data, sequence, which, device)
        params.batches.append(_whole(data, sequence, which, on) if later is None else later)
    tokens = [batch.tokens for batch in params.batches if batch.tokens is not None]
    params.order = torch.cat(tokens).argsort()
    return params


def of_a_length(lengths: np.ndarray, which: np.ndarray) -> list[np.ndarray]:
    """The sequences of `which`, bool, in batches, longest first, that together cost least: each a
    call, and as many pairs as its longest sequence has, for every sequence."""
    if not which.any():
        return []
    sizes, counts = (x[::-1] for x in np.unique(lengths[which], return_counts=True))
    if counts.sum() * sizes[0] ** 2.0 <= CALL:
        return [which]
    before = np.append(0, counts.cumsum())
    cost, begin = np.zeros(len(sizes) + 1), np.zeros(len(sizes) + 1, np.int64)
    for end in range(1, len(sizes) + 1):
        whole = cost[:end] + CALL + (before[end] - before[:end]) * sizes[:end] ** 2.0
        begin[end] = whole.argmin()
        cost[end] = whole[begin[end]]
    batches, end = [], len(sizes)
    while end:
        batches.append(which & (lengths <= sizes[begin[end]]) & (lengths >= sizes[end - 1]))
        end = begin[end]
    return batches[::-1]


def _whole(
    data: MicroBatch, sequence: np.ndarray, which: np.ndarray | None, on: torch.device
) -> PaddedBatch:
    """The sequences of `which`, bool; None: all, which are one batch, and each feeds all of its
    tokens. Queries stand at
    their positions, and places of a prompt that another sequence feeds have none."""
    lengths = np.diff(data.cu_seqlens)
    if which is None:
        longest = int(lengths.max())
        index = sequence * longest + data.positions
        return PaddedBatch(None, as_tensor(index, on), (len(lengths), longest))
    longest, number = int(lengths[which].max()), np.cumsum(which) - 1
    entries = np.flatnonzero(which[sequence])
    index = number[sequence] * longest + data.positions
    tokens = np.flatnonzero(which[sequence[data.fed]])
    keys = np.zeros(int(which.sum()) * longest, np.int64)
    keys[index[entries]] = data.fed_at[entries]
    shape = (int(which.sum()), longest)
    return PaddedBatch(
        as_tensor(tokens, on), as_tensor(index[data.fed[tokens]], on), shape, as_tensor(keys, on)
    )


def _following(
    data: MicroBatch, sequence: np.ndarray, which: np.ndarray, device: Device
) -> PaddedBatch | None:
    """The sequences of `which`, whose prompts others feed. None where the mask would be too
    large."""
    on, whole = device.torch_device, _whole(data, sequence, which, device.torch_device)
    count, longest = whole.shape
    tokens = np.flatnonzero(which[sequence[data.fed]])
    mine = sequence[data.fed[tokens]]
    fed = np.bincount(mine, minlength=len(which))
    most = int(fed.max())
    if count * most * longest > MOST_MASKED:
        return None
    starts = np.cumsum(fed) - fed
    number = (np.cumsum(which) - 1)[mine]
    index = number * most + np.arange(len(tokens)) - starts[mine]
    last = np.zeros(count * most, np.int64)  # the last key that each query sees
    last[index] = data.positions[data.fed[tokens]]
    seen = torch.arange(longest, device=on) <= as_tensor(last, on)[:, None]
    mask = torch.zeros(seen.shape, dtype=device.dtype, device=on)
    mask = mask.masked_fill_(~seen, float("-inf")).view(count, 1, most, longest)
    return PaddedBatch(as_tensor(tokens, on), as_tensor(index, on), (count, most), whole.keys, mask)


def as_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return on_device(torch.from_numpy(array), device)
