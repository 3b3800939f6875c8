"""How many tokens go to each expert, which the routes of a step tell before its forwards.

Megatron-core's dispatcher cuts by these numbers what its ranks exchange. Its own way is to ask the
other ranks and the device for them in every layer of every forward:

    upstream   router ─> count ─> ask the ranks ─> wait for the device ─> exchange
    here       once, before the forwards: count all layers of all micro-batches ─> ask the ranks
               router ─> exchange

A micro-batch where a rank misses routes, which a router then chooses itself, goes upstream's way.
What becomes of the sizes in a dispatcher is in `router_replay/dispatch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from megatron.core import parallel_state as ps
from torch import distributed as dist

from lora_moe_rl.kernels.route_codec.op import expert_counts
from lora_moe_rl.router_replay.replay import MicroRoutes

UNKNOWN = -1

OfChunks = Sequence[MicroRoutes | None]  # of each pipeline chunk of this rank


class Exchange:
    """The ranks that exchange tokens, and where they tell each other the sizes: on their hosts.

    Every rank of the world has to make one at the same time. `asks`: whether upstream's way asks
    anybody: another rank, or a device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        group = ps.get_expert_tensor_and_model_parallel_group()
        self.size = group.size()
        self.asks = self.size > 1 or device.type != "cpu"
        self.group = _on_hosts(group) if self.size > 1 else None

    def tell(self, works: Sequence[OfChunks]) -> Sequence[OfChunks]:
        """The routes of each micro-batch, with `sizes` where all of these ranks have routes of all
        their tokens. Every rank has to call this, with as many micro-batches."""
        if not self.asks or not works or not any(works[0]):
            return works
        mine = torch.stack([self._mine(chunks) for chunks in works])
        every = self._gathered(mine.cpu())  # a device is waited for once
        return [_told(chunks, every[:, i]) for i, chunks in enumerate(works)]

    def _mine(self, chunks: OfChunks) -> torch.Tensor:
        """int64 `[layers of all chunks, experts]` on the device; UNKNOWN where a router chooses."""
        found = []
        for routes in chunks:
            if routes is None:
                continue
            if routes.valid is None:
                found.append(expert_counts(routes.rows(), routes.layout, self.device))
            else:
                shape = routes.layout.num_layers, routes.layout.num_experts
                found.append(torch.full(shape, UNKNOWN, device=self.device))
        return torch.cat(found)

    def _gathered(self, mine: torch.Tensor) -> np.ndarray:
        """int64 `[ranks, micro-batches, layers of all chunks, experts]`."""
        if self.group is None:
            return mine[None].numpy()
        found = torch.empty((self.size, *mine.shape), dtype=torch.int64)
        dist.all_gather(list(found), mine, group=self.group)
        return found.numpy()


def _told(chunks: OfChunks, sizes: np.ndarray) -> OfChunks:
    """sizes: int64 `[ranks, layers of all chunks, experts]`."""
    told, first = [], 0
    for routes in chunks:
        last = first + (0 if routes is None else len(routes.layers))
        here, first = sizes[:, first:last], last
        known = routes is not None and (here != UNKNOWN).all()
        told.append(replace(routes, sizes=here) if known else routes)
    return told


def _on_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks, in a group whose collectives take tensors of the host."""
    if dist.get_backend(group) == "gloo":
        return group
    mine = tuple(dist.get_process_group_ranks(group))
    every: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    made = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in sorted(set(every))}
    return made[mine]
