"""Routed experts that trainer and engines hold once: a rank makes no copy of them.

The model is built without them, Megatron-Bridge loads the rest, and they become views of the
store, which verifies its bytes: who wrote them has compared them with the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from lora_moe_rl.base.shared import Shared
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
    """Gives this rank's experts their weights. Raises HeldBaseError for bytes that are not those
    that were written."""
    for name, linear in _grouped_linears(chunks):
        like = torch.empty(linear.shape, dtype=linear.dtype, device="meta")
        linear.hold(shared.part(name, like))


def _grouped_linears(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, ColumnGroupedLinear | RowGroupedLinear]]:
    """The experts of all layers of this rank, by Megatron's name with the global layer."""
    for chunk in chunks:
        for layer in getattr(chunk, "module", chunk).decoder.layers:
            for name, linear in layer.mlp.named_modules():
                if isinstance(linear, ColumnGroupedLinear | RowGroupedLinear):
                    yield f"decoder.layers.{layer.layer_number - 1}.mlp.{name}", linear
