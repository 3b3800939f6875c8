"""Mend for vLLM on the CPU: LoRA on linears (`vllm/lora/punica_wrapper/punica_cpu.py`).

Upstream gathers a copy of A and B for every token, and reads the last slot for tokens without an
adapter (their slot number is -1) when a batch mixes them with others. Here tokens are grouped by
slot, once a step; each group is two matrix products, and tokens without an adapter are left alone.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform

from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_lora.py"

# (slot, the tokens in it); None means all tokens of the batch.
SlotGroup = tuple[int, torch.Tensor | None]


class GroupedLoRA(PunicaWrapperCPU):
    """`slot_groups` holds the groups of the batch that runs, without tokens of the base;
    `token_mapping_meta` the slot of each token, which goes with it to experts on other ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.slot_groups: list[SlotGroup] = []
        self.token_mapping_meta = SimpleNamespace(token_lora_mapping=torch.empty(0))

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs):
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self.slot_groups = group_by_slot(self.token_lora_indices)
        self.token_mapping_meta.token_lora_mapping = self.token_lora_indices

    def add_lora_linear(
        self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs
    ):
        """y[:, slice i] += scale * x A_i^T B_i^T for the tokens of each slot.

        y [T, out], x [T, in], lora_a_stacked[i] [slots, 1, r, in], lora_b_stacked[i]
        [slots, 1, out_i, r]. Products and sums are in the slots' dtype.
        """
        for slot, tokens in self.slot_groups:
            x_group = x if tokens is None else x[tokens]
            start = 0
            for stacked_a, stacked_b, width in zip(
                lora_a_stacked, lora_b_stacked, output_slices, strict=True
            ):
                lora_a, lora_b = stacked_a[slot, 0], stacked_b[slot, 0]
                low = x_group.to(lora_a.dtype) @ lora_a.T
                target = y[:, start : start + width]
                if tokens is None and y.dtype == low.dtype:
                    target.addmm_(low, lora_b.T, alpha=scale)
                else:
                    delta = (low @ lora_b.T).to(y.dtype) * scale
                    rows = slice(None) if tokens is None else tokens
                    target[rows] = target[rows] + delta
                start += width

    def add_shrink(self, y, x, lora_a_stacked, scale, **kwargs):
        """y[i] += scale * x A_i^T for the tokens of each slot; for adapters that are cut over the
        workers along the rank, with add_expand after an exchange. y [slices, T, r], x [T, in]."""
        for slot, tokens in self.slot_groups:
            rows = slice(None) if tokens is None else tokens
            for low, stacked_a in zip(y, lora_a_stacked, strict=True):
                lora_a = stacked_a[slot, 0]
                low[rows] += (x[rows].to(lora_a.dtype) @ lora_a.T).to(low.dtype) * scale

    def add_expand(self, y, x, lora_b_stacked, output_slices, offset_start=0, **kwargs):
        """y[:, slice i] += x[i] B_i^T for the tokens of each slot. x [slices, T, r]."""
        for slot, tokens in self.slot_groups:
            rows = slice(None) if tokens is None else tokens
            start = offset_start
            for low, stacked_b, width in zip(x, lora_b_stacked, output_slices, strict=True):
                lora_b, target = stacked_b[slot, 0], y[:, start : start + width]
                target[rows] += (low[rows].to(lora_b.dtype) @ lora_b.T).to(y.dtype)
                start += width


def group_by_slot(slots: torch.Tensor) -> list[SlotGroup]:
    """Groups of a batch, from the slot number of each token `[T]` (-1: no adapter)."""
    if not len(slots):
        return []
    present = torch.unique(slots).tolist()
    if len(present) == 1:
        return [] if present[0] < 0 else [(present[0], None)]
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in present if slot >= 0]


def install() -> None:
    """Makes vLLM's CPU platform name this class."""
    require_version("vllm", WHO)
    require_parameters(
        PunicaWrapperCPU.add_lora_linear,
        ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"),
        WHO,
    )
    require_parameters(
        PunicaWrapperCPU.add_shrink, ("self", "y", "x", "lora_a_stacked", "scale"), WHO
    )
    require_parameters(
        PunicaWrapperCPU.add_expand,
        ("self", "y", "x", "lora_b_stacked", "output_slices", "offset_start"),
        WHO,
    )
    require_parameters(
        PunicaWrapperCPU.update_metadata,
        ("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"),
        WHO,
    )
    name = f"{GroupedLoRA.__module__}.{GroupedLoRA.__qualname__}"
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: name)
