"""Attention over packed sequences, some of which begin with a prompt that another one feeds,
against each sequence by itself in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

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
    ("alike", "most", "batches"),
    [
        (None, 2**26, [False]),
        ([0, 0, 2, 0, 2, 0], 2**26, [False, True]),
        ([0, 0, 2, 0, 2, 0], 10, [False]),  # a mask would be too large
        ([0, 1, 2, 0, 4, 5], 2**26, [False, True]),
    ],
)
def test_it_is_the_attention_of_each_sequence(monkeypatch, alike, most, batches):
    from lora_moe_rl.trainer import local_modules, packed_sequences
    from lora_moe_rl.trainer.device import Device

    monkeypatch.setattr(packed_sequences, "MOST_MASKED", most)
    data = micro_batch(alike)
    params = packed_sequences.packed_params(data, Device("cpu", torch.float32), slice(None))
    assert [batch.mask is not None for batch in params.batches] == batches
    assert params.cu_seqlens_q.tolist() == data.positions[data.fed].tolist()
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    config = SimpleNamespace(kv_channels=D)
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
