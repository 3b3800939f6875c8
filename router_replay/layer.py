"""The replay of one router of Megatron-core: what it is told, what it chose, and what is counted.

Under activation recomputation a router runs again in backward, when routes of a later micro-batch
are installed. It is served from what it used the first time, found by the memory of its layer's
input: that is kept from the forward to the backward, so no other micro-batch can have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.dispatch import Dispatch, LayerSizes


class LayerReplay:
    """The replay of one router.

    `micro_batch` is what `install` was told of the micro-batch that runs, in backward too.
    `judged`: whether forwards in training are those of the policy: their own choices are compared
    with the replayed ones, and the routes that they use are counted. `stands_for`: int64 `[T]`, how
    many tokens each is fed for, 0 for padding; None where all are fed for themselves.
    """

    def __init__(self, number: int, layer: torch.nn.Module, moe: MoELayer):
        self.number, self.moe = number, moe
        self.instance: RouterReplay = moe.router.router_replay
        self.upstream = self.instance.get_replay_topk
        self.instance.get_replay_topk = self.topk
        self.dispatch = Dispatch(number, moe)
        self.recompute = moe.config.recompute_granularity == "full"
        if self.recompute:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.judged = True
        self.reset()

    def reset(self) -> None:
        self.instance.clear_indices()
        self.instance.clear_router_replay_action()
        self.dispatch.reset()
        self.micro_batch: Any = None
        self.stands_for: torch.Tensor | None = None
        self.clear_target()
        self.recorded: torch.Tensor | None = None
        # Of a recomputation, by input: its routes, their sizes, and the micro-batch.
        self.waiting: dict[int, tuple[torch.Tensor, LayerSizes | None, Any]] = {}
        self.input = 0
        self.calls = self.recomputations = 0
        self.differing: torch.Tensor | int = 0
        self.replayed: torch.Tensor | int = 0
        self.loads: torch.Tensor | None = None

    def set_target(
        self,
        target: Callable[[], torch.Tensor],
        counted: torch.Tensor | None = None,
        free: torch.Tensor | None = None,
        sizes: LayerSizes | None = None,
    ) -> None:
        """target: gives int64 `[T, K]` in the router's forward, so that no more than one layer's
        ids are there at a time; counted: bool `[T]`, tokens with recorded routes (None: all);
        free: bool `[T]`, those that the router routes itself (None: none); sizes: None where they
        are not known beforehand, as with any that is free."""
        self.target, self.counted, self.free, self.sizes = target, counted, free, sizes

    def clear_target(self) -> None:
        self.target = self.counted = self.free = self.sizes = None

    def _enter(self, layer, args, kwargs) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.input = hidden.data_ptr()

    def topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """As upstream: (values, indices) `[T, K]`."""
        saved = self.recompute and self.moe.training
        if saved and torch.is_grad_enabled():
            chosen, self.dispatch.sizes = self._chosen_before()
        else:
            self.calls += 1
            with torch.no_grad():
                own = default_compute_topk(
                    scores.detach(), topk, num_groups=num_groups, group_topk=group_topk
                )[1]
            chosen = self._choose(own)
            self._count(chosen)
            self.recorded, self.dispatch.sizes = own, self.sizes
            if saved:
                if self.input in self.waiting:
                    raise ReplayError(f"layer {self.number}: two micro-batches share one input")
                self.waiting[self.input] = chosen, self.sizes, self.micro_batch
        self.instance.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        self.instance.set_target_indices(chosen)
        self.instance.replay_backward_list.clear()  # recomputation is served by us
        return self.upstream(scores, topk, num_groups, group_topk, default_compute_topk)

    def _choose(self, own: torch.Tensor) -> torch.Tensor:
        if self.target is None:
            return own
        target = self.target()
        if target.shape != own.shape:
            raise ReplayError(
                f"layer {self.number}: routes of shape {tuple(target.shape)} for "
                f"{own.shape[0]} tokens and {own.shape[1]} experts"
            )
        if self.moe.training and self.judged:  # not the reference's choice, nor that of a probe
            there = own.new_zeros(own.shape[0], self._num_experts, dtype=torch.bool)
            other = ~there.scatter_(1, target, True).gather(1, own)
            if self.counted is None:
                self.replayed += own.numel()
            else:
                other &= self.counted.unsqueeze(1)
                self.replayed += self.counted.sum() * own.shape[1]
            self.differing += other.sum()
        if self.free is None:
            return target
        return torch.where(self.free.unsqueeze(1), own, target)

    def _count(self, chosen: torch.Tensor) -> None:
        """Adds the experts that a forward of the policy in training uses to `loads`."""
        if not (self.moe.training and self.judged):
            return
        if self.loads is None:
            self.loads = chosen.new_zeros(self._num_experts)
        ones = torch.ones_like(chosen)
        if self.stands_for is not None:
            ones *= self.stands_for.unsqueeze(1)
        self.loads.index_add_(0, chosen.flatten(), ones.flatten())

    @property
    def _num_experts(self) -> int:
        number = self.moe.config.num_moe_experts
        assert number is not None
        return number

    def _chosen_before(self) -> tuple[torch.Tensor, LayerSizes | None]:
        if self.input not in self.waiting:
            raise ReplayError(
                f"layer {self.number}: backward recomputes a micro-batch that had no forward"
            )
        self.recomputations += 1
        chosen, sizes, self.micro_batch = self.waiting.pop(self.input)
        return chosen, sizes
