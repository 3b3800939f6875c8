"""What a trainer rank takes of linears and vocabulary that engines hold too."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lora_moe_rl.adapters.layers import merge_qkv
from lora_moe_rl.base.dense import EMBEDDING
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.trainer import shared_dense
from lora_moe_rl.trainer.shared_dense import adopt, by_group, by_module, share_vocabulary

HEADS, GROUPS, SIZE = 8, 4, 3


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_q_k_and_v_of_engine_ranks_are_in_megatrons_order(pieces):
    """Against what adapters' outputs go through."""
    whole = [torch.randn(5, n * SIZE) for n in (HEADS, GROUPS, GROUPS)]
    ranks = zip(*(one.chunk(pieces, dim=-1) for one in whole), strict=True)
    held = torch.cat([part for rank in ranks for part in rank], dim=-1)
    sizes = [one.shape[-1] // pieces for one in whole]
    found = by_group(held, sizes, pieces, GROUPS // pieces)
    assert torch.equal(found, merge_qkv(GROUPS)(whole))


def test_gate_and_up_of_engine_ranks():
    held = torch.tensor([[1, 2, 11, 12, 3, 4, 13, 14]])  # two ranks: gate, up; gate, up
    assert by_module(held, [2, 2], 2).tolist() == [[1, 2, 3, 4, 11, 12, 13, 14]]


class Linear(torch.nn.Linear):
    """As Megatron's: returns (output, bias)."""

    def forward(self, x):
        return super().forward(x), None


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_computes_the_same_on_what_is_held(bias):
    linear, x = Linear(5, 8, bias=bias), torch.randn(3, 5)
    order = partial(by_group, sizes=[4, 2, 2], pieces=1, groups=2)
    places = order(torch.arange(8))
    held = torch.empty(8, 5)
    held[places] = linear.weight.data
    before = linear(x)[0]
    adopt("linear", linear, held, order)
    torch.testing.assert_close(linear(x)[0], before)
    assert linear.weight.data_ptr() == held.data_ptr()


def test_a_rank_has_its_rows_of_the_vocabulary_and_no_copy(monkeypatch):
    monkeypatch.setattr(shared_dense.ps, "get_tensor_model_parallel_rank", lambda: 1)
    held = torch.randn(64, 4)
    embedding = torch.nn.Embedding(3, 4, _weight=held[3:6].clone())
    model = SimpleNamespace(embedding=SimpleNamespace(word_embeddings=embedding))
    shared = SimpleNamespace(dense={EMBEDDING: None}, store={EMBEDDING: held})
    share_vocabulary(model, shared)
    assert embedding.weight.data_ptr() == held[3:].data_ptr()


def test_other_values_than_are_held_are_refused():
    linear = Linear(5, 8)
    held = linear.weight.data.clone()
    held[3, 2] += 1
    with pytest.raises(HeldBaseError, match="layer: the checkpoint has other values"):
        adopt("layer", linear, held)
