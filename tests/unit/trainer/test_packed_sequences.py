"""Attention over packed sequences, some of which begin with a prompt that another one feeds,
against each sequence by itself in float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import MicroBatch, pack

pytestmark = pytest.mark.seconds  # imports Megatron
HEADS, KV_HEADS, D, DV = 4, 2, 8, 6


def micro_batch(alike: list[int] | None) -> MicroBatch:
    """Prompts of 5 and 2 tokens with responses of several lengths; three tokens of padding."""
    together = [0, 0, 1, 0, 1, 0]
    ids = [[*range(5 - 3 * g), *range(100 * i, 100 * i + 3 + i)] for i, g in enumerate(together)]
    batch = TrainBatch.from_sequences(ids, [5 - 3 * g for g in together])
    batch.alike = None if alike is None else np.array(alike)
    return pack(batch, range(6), multiple=1, at_least=batch.fed_together(range(6)) + 3)


def tensors(data: MicroBatch):
    torch.manual_seed(0)
    sizes = (HEADS, D), (KV_HEADS, D), (KV_HEADS, DV)
    return [torch.randn(len(data.fed), *size, requires_grad=True) for size in sizes]


def by_sequence(data: MicroBatch, q, k, v) -> torch.Tensor:
    """`[F, heads * DV]`, float64: of each sequence the queries that it feeds."""
    out = torch.zeros(len(data.fed), HEADS * DV, dtype=torch.float64)
    for start, stop in zip(data.cu_seqlens[:-1], data.cu_seqlens[1:], strict=True):
        at = torch.from_numpy(data.fed_at[start:stop])
        mine = np.isin(np.arange(start, stop), data.fed)
        sides = [x[at].double().transpose(0, 1) for x in (q, k, v)]
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in sides[1:])
        scores = sides[0] @ keys.transpose(1, 2) * D**-0.5
        later = torch.ones(len(at), len(at), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        found = (weights @ values).transpose(0, 1).flatten(1)
        out = out.index_put((at[torch.from_numpy(mine)],), found[torch.from_numpy(mine)])
    return out


@pytest.mark.parametrize(
    ("alike", "most", "call", "batches"),
    [
        (None, 2**26, 2**20, [False]),
        (None, 2**26, 0, [False] * 6),  # of 3, 6, 7, 8, 10 and 12 tokens
        (None, 2**26, 60, [False] * 2),
        ([0, 0, 2, 0, 2, 0], 2**26, 2**20, [True, False]),
        ([0, 0, 2, 0, 2, 0], 2**26, 0, [True] * 3 + [False] * 3),
        ([0, 0, 2, 0, 2, 0], 10, 2**20, [False, False]),  # a mask would be too large
        ([0, 1, 2, 0, 4, 5], 2**26, 2**20, [True, False]),
    ],
)
def test_it_is_the_attention_of_each_sequence(monkeypatch, alike, most, call, batches):
    from lora_moe_rl.trainer import local_modules, packed_sequences
    from lora_moe_rl.trainer.device import Device

    monkeypatch.setattr(packed_sequences, "MOST_MASKED", most)
    monkeypatch.setattr(packed_sequences, "CALL", call)
    data = micro_batch(alike)
    params = packed_sequences.packed_params(data, Device("cpu", torch.float32), slice(None))
    assert [batch.mask is not None for batch in params.batches] == batches
    assert params.cu_seqlens_q.tolist() == data.positions[data.fed].tolist()
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    config = SimpleNamespace(
        kv_channels=D, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
    )
    attention = local_modules.PackedAttention(config, 1, None, "self", pg_collection=groups)
    q, k, v = tensors(data)
    out = attention(q, k, v, None, packed_seq_params=params)
    wanted = by_sequence(data, q, k, v)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
    weights = torch.randn(out.shape)
    got = torch.autograd.grad((out * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("most", "wanted"), [(0, []), (100, [84]), (140, [84, 50]), (999, [84, 50, 96])]
)
def test_all_masks_together_are_no_larger_than_one_may_be(monkeypatch, most, wanted):
    """Longest sequences first; a batch whose mask has no room left is padded."""
    from lora_moe_rl.trainer import packed_sequences
    from lora_moe_rl.trainer.device import Device

    monkeypatch.setattr(packed_sequences, "MOST_MASKED", most)
    monkeypatch.setattr(packed_sequences, "CALL", 0)
    data = micro_batch([0, 0, 2, 0, 2, 0])
    batches = packed_sequences.packed_params(
        data, Device("cpu", torch.float32), slice(None)
    ).batches
    assert [batch.mask.numel() for batch in batches if batch.mask is not None] == wanted


class Written(TorchDispatchMode):
    """Counts the elements that operations give."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.elements += sum(x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor))
        return found


def test_what_is_written_does_not_grow_with_the_number_of_batches(monkeypatch):
    """A slice's gradient is as large as what it is cut from: one for each batch would be more than
    all padding is."""
    from lora_moe_rl.trainer import local_modules, packed_sequences
    from lora_moe_rl.trainer.device import Device

    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    config = SimpleNamespace(
        kv_channels=D, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
    )
    attention = local_modules.PackedAttention(config, 1, None, "self", pg_collection=groups)
    ids = [np.zeros(n, np.int32) for n in range(60, 100)]
    data = pack(TrainBatch.from_sequences(ids), range(len(ids)), 1)
    q, k, v = tensors(data)
    found = {}
    for call in (2**62, 0):
        monkeypatch.setattr(packed_sequences, "CALL", call)
        params = packed_sequences.packed_params(data, Device("cpu", torch.float32), slice(None))
        with Written() as written:
            attention(q, k, v, None, packed_seq_params=params).sum().backward()
        found[len(params.batches)] = written.elements
    assert list(found) == [1, 40] and found[40] < 1.2 * found[1]


def test_prompts_are_not_shared_where_attention_cannot_have_it():
    from lora_moe_rl.errors import ConfigError
    from lora_moe_rl.trainer.packed_sequences import packed_params

    device = SimpleNamespace(transformer_engine=True, torch_device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="set trainer.share_prompts=off"):
        packed_params(micro_batch([0, 0, 2, 0, 2, 0]), device, slice(None))
    plain = micro_batch(None)
    assert (
        packed_params(plain, device, slice(None)).cu_seqlens_q.tolist() == plain.cu_seqlens.tolist()
    )


def cost(batches: list[list[int]], call: int) -> int:
    """Of the lengths of each batch."""
    return sum(call + len(one) * max(one) ** 2 for one in batches)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 3000))
def test_sequences_are_put_together_at_the_least_cost(lengths, call):
    """Against all ways to cut them, longest first; sequences that are not asked for are in none."""
    from lora_moe_rl.trainer import packed_sequences

    lengths, which = np.array([*lengths, 41]), np.append(np.ones(len(lengths), bool), False)
    with mock.patch.object(packed_sequences, "CALL", call):
        found = packed_sequences.of_a_length(lengths, which)
    assert (np.sum(found, axis=0) == which).all()
    ordered = sorted(lengths[which].tolist(), reverse=True)
    cuts = [
        [0, *places, len(ordered)]
        for n in range(len(ordered))
        for places in itertools.combinations(range(1, len(ordered)), n)
    ]
    least = min(cost([ordered[a:b] for a, b in itertools.pairwise(cut)], call) for cut in cuts)
    assert cost([lengths[one].tolist() for one in found], call) == least
    longest = [lengths[one].max() for one in found]
    assert longest == sorted(longest, reverse=True)


def test_short_sequences_are_not_padded_to_a_long_one():
    """31 of 1,000 tokens beside one of 100,000: as one batch they would be 3,200,000 places."""
    from lora_moe_rl.trainer.packed_sequences import of_a_length

    lengths = np.array([1000] * 20 + [100_000] + [900] * 11)
    found = of_a_length(lengths, np.ones(32, bool))
    assert [int(one.sum()) for one in found] == [1, 20, 11]
    assert of_a_length(lengths, np.zeros(32, bool)) == []
