"""Rows that engines hold in another order than Megatron."""

from __future__ import annotations

import pytest
import torch

from lora_moe_rl.adapters.layers import merge_qkv
from lora_moe_rl.trainer.shared_dense import by_group, by_module

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
