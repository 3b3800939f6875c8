"""One dispatcher of Megatron-core, told how many tokens go to each expert: see `sizes.py`.

Where they are not those of the router's map is counted on the device, and read after the step.

Wrapped: `preprocess` of `MoEAlltoAllTokenDispatcher` of megatron-core
(`core/transformer/moe/token_dispatcher.py`), which asks the other ranks, and has the device asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from lora_moe_rl.errors import ReplayError
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "router_replay/dispatch.py"
USED = (
    "ep_size",
    "tp_size",
    "tp_rank",
    "tp_ep_group",
    "num_local_experts",
    "local_expert_indices",
    "cuda_sync_point",
)


@dataclass(frozen=True)
class LayerSizes:
    """Of one layer and micro-batch. every: int64 `[ranks, experts]` on the host, tokens that each
    rank's router sends to each expert; mine: int64 `[experts]` of this rank, on its device."""

    every: np.ndarray
    mine: torch.Tensor


class Dispatch:
    """One dispatcher. `sizes`: of the forward that comes, and of no other; None: it asks for them.
    `wrong`: how often an expert was sent another number of tokens than these."""

    def __init__(self, number: int, moe: MoELayer):
        require_version("megatron-core", WHO)
        self.number, self.dispatcher = number, moe.token_dispatcher
        if not isinstance(self.dispatcher, MoEAlltoAllTokenDispatcher):
            name = type(self.dispatcher).__name__
            raise ReplayError(f"layer {number}: {WHO} knows no dispatcher {name}")
        require_parameters(self.dispatcher.preprocess, ("routing_map",), WHO)
        require_attributes(self.dispatcher, USED, WHO)
        if self.dispatcher.config.moe_permute_fusion:
            raise ReplayError(f"layer {number}: {WHO} knows moe_permute_fusion=False alone")
        self.upstream = self.dispatcher.preprocess
        self.dispatcher.preprocess = self.preprocess
        self.reset()

    def reset(self) -> None:
        self.sizes: LayerSizes | None = None
        self.wrong: torch.Tensor | int = 0

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """As upstream: bool `[T, experts]` -> int64 `[this rank's experts]`, tokens of each."""
        # Kept there until the layer's next forward for their dtype alone, and with them their
        # graph: of a recomputed layer the input, and its gradient.
        self.dispatcher.probs = self.dispatcher.probs.new_empty(0)
        sizes, self.sizes = self.sizes, None
        if sizes is None:
            return self.upstream(routing_map)
        to, every, mine = self.dispatcher, sizes.every, sizes.mine
        self.wrong += (routing_map.sum(dim=0) != mine).sum()
        to.cuda_sync_point = "no_sync"
        to.num_out_tokens = routing_map.size(0) * to.config.moe_router_topk
        local = to.local_expert_indices
        by_rank = every.reshape(to.ep_size, to.tp_size, -1).swapaxes(0, 1)
        here = by_rank[:, :, local[0] : local[-1] + 1]  # [tp, ep, experts here]
        if to.ep_size > 1 or to.tp_size > 1:
            sent = every[to.tp_ep_group.rank()].reshape(to.ep_size, -1)
            received = here.sum(axis=2)
            to.input_splits = sent.sum(axis=1)
            to.output_splits = received[to.tp_rank]
            to.output_splits_tp = received.sum(axis=1)
        if to.num_local_experts > 1:
            chunks = np.ascontiguousarray(here).reshape(-1, to.num_local_experts)
            to.num_global_tokens_per_local_expert = torch.from_numpy(chunks)
        return torch.from_numpy(here.sum(axis=(0, 1)))
