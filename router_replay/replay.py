"""Replays router decisions in Megatron-core, through its own `RouterReplay` instances.

One `RouterReplay` belongs to each MoE router of this rank. Before a micro-batch's forward the
routes of its tokens are installed, by global layer number; each router then takes them instead of
its own top-k, gathers its probabilities from its own scores, and its own choice is counted beside
them. Nothing here is optional: a router that did not consume its routes stops the step.

Wrapped: `RouterReplay.get_replay_topk` of megatron-core 0.19.2
(`core/transformer/moe/router_replay.py`), which every unfused top-k calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.table import RouteTable


class _Layer:
    """The replay of one router."""

    def __init__(self, number: int, instance: RouterReplay):
        self.number = number
        self.instance = instance
        self.upstream = instance.get_replay_topk
        instance.get_replay_topk = self.topk
        self.reset()

    def reset(self) -> None:
        self.instance.clear_indices()
        self.instance.clear_router_replay_action()
        self.target: torch.Tensor | None = None  # int64 [T, K]
        self.valid: torch.Tensor | None = None  # bool [T]
        self.recorded: torch.Tensor | None = None
        self.calls = 0
        self.differing = 0
        self.replayed = 0

    def topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """As upstream: (values, indices) `[T, K]`."""
        self.calls += 1
        if self.target is None:
            out = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            self.recorded = out[1].detach()
            return out
        if self.target.shape != (scores.shape[0], topk):
            raise ReplayError(
                f"layer {self.number}: routes of shape {tuple(self.target.shape)} for "
                f"{scores.shape[0]} tokens and {topk} experts"
            )
        with torch.no_grad():
            own = default_compute_topk(
                scores.detach(), topk, num_groups=num_groups, group_topk=group_topk
            )[1]
            chosen = torch.where(self.valid.unsqueeze(1), self.target, own)
            same = (own.unsqueeze(2) == self.target.unsqueeze(1)).any(2)
            self.differing += int((~same[self.valid]).sum())
            self.replayed += int(self.valid.sum()) * topk
        self.instance.set_target_indices(chosen)
        self.instance.replay_backward_list.clear()  # nothing is recomputed in backward
        return self.upstream(scores, topk, num_groups, group_topk, default_compute_topk)


class Replay:
    """The routers of this rank's part of one model: of each of its pipeline chunks."""

    def __init__(self, chunks: Sequence[torch.nn.Module], moe_layers: tuple[int, ...]):
        """Raises ReplayError when the routers are not what the model's config promises."""
        self.chunks = [_routers(chunk, moe_layers) for chunk in chunks]
        self.layers = {n: layer for chunk in self.chunks for n, layer in chunk.items()}

    @contextmanager
    def step(self):
        """Cleared when the step ends or fails. Yields self."""
        try:
            yield self
        finally:
            for layer in self.layers.values():
                layer.reset()

    def install(
        self, chunk: int, table: RouteTable, rows: np.ndarray, device: torch.device
    ) -> None:
        """Routes of one micro-batch. `rows` `[T]`: its tokens' rows of the table; -1: padding."""
        mine = _sequence_shard(rows)
        known = mine >= 0
        safe = np.where(known, mine, 0)
        columns = {number: column for column, number in enumerate(table.layers)}
        for number, layer in self.chunks[chunk].items():
            column = columns[number]
            layer.target = torch.from_numpy(table.ids[safe, column].astype(np.int64)).to(device)
            layer.valid = torch.from_numpy(known & table.valid[safe, column]).to(device)
            layer.instance.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def install_recorded(self, chunk: int, recorded: dict[int, torch.Tensor]) -> None:
        """Routes that `take_recorded` returned for the same micro-batch."""
        for number, layer in self.chunks[chunk].items():
            layer.target = recorded[number]
            layer.valid = torch.ones(
                len(layer.target), dtype=torch.bool, device=layer.target.device
            )
            layer.instance.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def clear_routes(self, chunk: int) -> None:
        """The routers choose for themselves again, and record what they choose."""
        for layer in self.chunks[chunk].values():
            layer.target = None
            layer.instance.clear_router_replay_action()

    def take_recorded(self, chunk: int) -> dict[int, torch.Tensor]:
        """The routers' own choices in the last forward, `{layer: int64 [T, K]}`."""
        return {number: layer.recorded for number, layer in self.chunks[chunk].items()}

    def counts(self) -> tuple[int, int]:
        """(routes where the trainer's own choice differs, routes replayed), over this rank's tokens
        since the step began."""
        layers = self.layers.values()
        return sum(x.differing for x in layers), sum(x.replayed for x in layers)

    def check_calls(self, expected: Sequence[int]) -> None:
        """Raises ReplayError unless every router of chunk i ran `expected[i]` times since the step
        began."""
        for chunk, times in zip(self.chunks, expected, strict=True):
            for layer in chunk.values():
                if layer.calls != times:
                    raise ReplayError(
                        f"layer {layer.number}: its router consulted replay {layer.calls} times in "
                        f"{times} forwards"
                    )


def _routers(model: torch.nn.Module, moe_layers: tuple[int, ...]) -> dict[int, _Layer]:
    found = {}
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        routers = [m for m in layer.modules() if isinstance(m, TopKRouter)]
        if len(routers) != (number in moe_layers):
            raise ReplayError(
                f"layer {number} has {len(routers)} routers; the model's config says "
                f"{int(number in moe_layers)}"
            )
        for router in routers:
            if router.router_replay is None or router.config.moe_router_fusion:
                raise ReplayError(f"layer {number}: its router bypasses replay")
            found[number] = _Layer(number, router.router_replay)
    return found


def _sequence_shard(values: np.ndarray) -> np.ndarray:
    """Under sequence parallelism a router sees one of tp equal slices of the tokens."""
    tp = ps.get_tensor_model_parallel_world_size()
    return values.reshape(tp, -1)[ps.get_tensor_model_parallel_rank()]
