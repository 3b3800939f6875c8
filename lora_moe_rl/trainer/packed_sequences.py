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

# Of all masks of a micro-batch, which all layers share; queries of a batch that would have more are
# padded as keys are.
MOST_MASKED = 2**26
# What a further call costs, in pairs of a query and a key: by arithmetic, of some ten kernels on a
# GPU and 32 heads of 128.
CALL = 2**20


@dataclass
class PaddedBatch:
    """Some sequences as attention sees them.

    queries and keys: the places of each, (sequences, longest). mask: float `[sequences, 1, longest
    of queries, longest of keys]`, added to the scores; None: a query sees the keys up to its own
    place.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: torch.Tensor | None = None


@dataclass
class PackedParams(PackedSeqParams):
    """For the local modules. cu_seqlens_q and cu_seqlens_kv hold the positions of the tokens that
    this rank is fed, int64 `[F / cp]`, which is all that the rotary embedding makes of them.

    The batches are of all F that are fed, and stand one after the other. places: int64 `[F]`, where
    each token's query is among theirs. keys: int64 `[places of keys]`, the token fed whose key and
    value stand at each place; None: those of the queries. whole: int64 `[F]`, where each token fed
    is among the places of keys, which have every sequence whole.
    """

    batches: list[PaddedBatch] = field(default_factory=list)
    places: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    whole: torch.Tensor | None = None


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
    _place(params, data, device)
    return params


def _place(params: PackedParams, data: MicroBatch, device: Device) -> None:
    """Fills in the batches, and where all that is theirs stands."""
    on, lengths, positions = device.torch_device, np.diff(data.cu_seqlens), data.positions
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    of_fed = sequence[data.fed]
    fed = np.bincount(of_fed, minlength=len(lengths))
    # Where queries stand: at their positions, or where the prompt is another's and there is a mask,
    # one after the other.
    at = positions[data.fed]
    in_turn = np.arange(len(of_fed)) - (np.cumsum(fed) - fed)[of_fed]
    first_query, first_key = np.zeros((2, len(lengths)), np.int64)
    queries, keys, left = 0, 0, MOST_MASKED
    follows = fed < lengths
    for which in (*of_a_length(lengths, follows), *of_a_length(lengths, ~follows)):
        count, longest = int(which.sum()), int(lengths[which].max())
        most = int(fed[which].max())
        masked = bool(follows[which].any()) and count * most * longest <= left
        batch = PaddedBatch((count, most if masked else longest), (count, longest))
        if masked:
            left -= count * most * longest
            mine = which[of_fed]
            index = (np.cumsum(which) - 1)[of_fed[mine]] * most + in_turn[mine]
            batch.mask = _mask(batch, index, at[mine], device)
            at[mine] = in_turn[mine]
        first_query[which] = queries + np.arange(count) * batch.queries[1]
        first_key[which] = keys + np.arange(count) * longest
        queries, keys = queries + count * batch.queries[1], keys + count * longest
        params.batches.append(batch)
    params.places = as_tensor(first_query[of_fed] + at, on)
    params.whole = params.places
    if data.shares:
        whole = (first_key[sequence] + positions)[data.fed]
        params.whole = as_tensor(whole, on)
        # Padding has the key of some token, and each another: their gradients are added, zeros all.
        token = np.arange(keys) % len(of_fed)
        token[first_key[sequence] + positions] = data.fed_at
        params.keys = as_tensor(token, on)


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


def _mask(
    batch: PaddedBatch, index: np.ndarray, position: np.ndarray, device: Device
) -> torch.Tensor:
    """index: where the queries stand in the batch; position: of each in its sequence."""
    on, (count, most), longest = device.torch_device, batch.queries, batch.keys[1]
    last = np.zeros(count * most, np.int64)  # the last key that each query sees
    last[index] = position
    seen = torch.arange(longest, device=on) <= as_tensor(last, on)[:, None]
    mask = torch.zeros(seen.shape, dtype=device.dtype, device=on)
    return mask.masked_fill_(~seen, float("-inf")).view(count, 1, most, longest)


def as_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return on_device(torch.from_numpy(array), device)
