"""Routed experts that trainer and engines hold once: a rank makes no copy of them.

The model is built without them, Megatron-Bridge loads the rest, and they become views of the
store; each is compared with the checkpoint, which is read one expert at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from megatron.core import parallel_state as ps

from lora_moe_rl.base.shared import Shared, check_same
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.trainer.local_modules import (
    ColumnGroupedLinear,
    RowGroupedLinear,
    place_experts,
)


def place(provider, hf_config) -> None:
    """The models that Bridge's provider builds get experts without weights. `hf_config`: by which
    Bridge knows that it loads none."""
    from lora_moe_rl.trainer.bridge_parts import EXPERTS_HELD

    setattr(hf_config, EXPERTS_HELD, True)
    leaves = (partial(one, later=True) for one in (ColumnGroupedLinear, RowGroupedLinear))
    place_experts(provider, *leaves)


def load(chunks: Sequence[torch.nn.Module], shared: Shared) -> None:
    """Gives this rank's experts their weights. Raises HeldBaseError for other ones than the
    checkpoint has."""
    base = Base(shared.held.model_dir)
    try:
        for name, linear in _grouped_linears(chunks):
            like = torch.empty(linear.shape, dtype=linear.dtype, device="meta")
            linear.hold(shared.part(name, like))
            _compare(base, shared, name, linear.stacked)
    finally:
        base.weights.close()


def _grouped_linears(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, ColumnGroupedLinear | RowGroupedLinear]]:
    """The experts of all layers of this rank, by Megatron's name with the global layer."""
    for chunk in chunks:
        for layer in getattr(chunk, "module", chunk).decoder.layers:
            for name, linear in layer.mlp.named_modules():
                if isinstance(linear, ColumnGroupedLinear | RowGroupedLinear):
                    yield f"decoder.layers.{layer.layer_number - 1}.mlp.{name}", linear


def _compare(base: Base, shared: Shared, name: str, stacked: torch.Tensor) -> None:
    stack = shared.stacks[name]
    side, cut = 0 if stack.cut_rows else 1, ps.get_expert_tensor_parallel_rank()
    first = ps.get_expert_model_parallel_rank() * len(stacked)
    for local_expert, held in enumerate(stacked):
        rows = held.chunk(len(stack.modules))
        for module, mine in zip(stack.modules, rows, strict=True):
            expert = first + local_expert
            whole = base.weight(stack.layer, module, expert).to(held.dtype)
            part = whole.chunk(shared.cut.pieces, dim=side)[cut]
            check_same(base.name(stack.layer, module, expert), mine, part)
