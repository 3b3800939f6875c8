"""What vLLM's kernels are told of a step's adapters, where experts serve tokens of other ranks."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

from lora_moe_rl.rollout import dp_lora

SLOTS = 3
FIELDS = (
    "token_lora_mapping", "token_indices_sorted_by_lora_ids", "active_lora_ids",
    "num_tokens_per_lora", "lora_token_start_loc", "no_lora_flag_cpu", "num_active_loras_cpu",
)  # fmt: skip


def made(prepare, *batches: list[int]) -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(SLOTS, 8, "cpu")
    for batch in batches:
        prepare(meta, torch.tensor(batch))
    return meta


def test_a_batch_of_all_slots_is_told_as_vllm_does():
    batch = [1, -1, 0, 2, 2, -1, 0]
    ours, stock = made(dp_lora._prepare_tensors, batch), made(LoRAKernelMeta.prepare_tensors, batch)
    for name in FIELDS:
        tokens = slice(len(batch) if name.startswith("token") else None)
        assert torch.equal(getattr(ours, name)[tokens], getattr(stock, name)[tokens]), name


@pytest.mark.parametrize("batch", [[1, 1, -1], [-1, -1], [0]])
def test_slots_that_only_other_ranks_have_are_named_too(batch):
    """By vLLM's own method a kernel that goes through the slots would pass them by."""
    meta = made(dp_lora._prepare_tensors, [0, 1, 2, 2], batch)
    assert meta.active_lora_ids.tolist() == [-1, 0, 1, 2]
    assert meta.num_tokens_per_lora.tolist() == [batch.count(slot) for slot in range(-1, SLOTS)]
    assert meta.token_lora_mapping[: len(batch)].tolist() == batch  # not those of the step before
    assert not meta.no_lora_flag_cpu.item() and meta.num_active_loras_cpu.item() == SLOTS + 1
    for place, slot in enumerate(range(-1, SLOTS)):
        start, stop = meta.lora_token_start_loc[place : place + 2].tolist()
        tokens = meta.token_indices_sorted_by_lora_ids[start:stop].tolist()
        assert tokens == [i for i, one in enumerate(batch) if one == slot]
