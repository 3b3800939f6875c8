"""The trainer's side: what a rank takes of the store in place of a copy of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.sharding import Box, RankLayout
from lora_moe_rl.base.dense import Dense
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.ipc import Cuda
from lora_moe_rl.base.ipc_store import Mapped
from lora_moe_rl.base.layout import Stack, kind, rule
from lora_moe_rl.base.parts import trainer_part
from lora_moe_rl.base.store import Store
from lora_moe_rl.config import RolloutConfig, TrainerConfig
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.refit.merged_base import Base


@dataclass(frozen=True)
class Shared:
    """The store of a run, as a trainer rank cuts it."""

    held: Held
    store: Store | Mapped
    at: RankLayout  # this rank's place
    stacks: dict[str, Stack]  # by Megatron's name of the module
    dense: dict[str, Dense]  # by vLLM's name; what trainer ranks take
    shape: ModelShape

    @classmethod
    def of(cls, held: Held, config: TrainerConfig, device: str) -> Shared:
        """Writes the store if nobody has; on a GPU maps what the engine's rank there has shared.
        Raises HeldBaseError where ranks cannot hold it."""
        if held.gpu != (device == "cuda"):
            raise HeldBaseError(
                f"the base is held on the {'GPU' if held.gpu else 'CPU'}, and this trainer is on "
                f"{device}; set model.held_once=off"
            )
        base = Base(held.model_dir)
        base.weights.close()
        engine = RolloutConfig(tp=held.tp, ep=held.ep)
        found = rule(base.shape, config, engine, on_gpus=held.gpu)
        reasons = {one.name: one.reason for one in found}
        stacks = {stack.megatron: stack for stack in held.stacks()}
        if why := next((one.reason for one in found if one.reason and ".experts." in one.name), ""):
            raise HeldBaseError(f"{why}; or set model.held_once=off")
        dense = {name: one for name, one in held.dense(base).items() if not reasons[kind(one)]}
        store = held.map(Cuda()) if held.gpu else held.open()
        return cls(held, store, _here(), stacks, dense, base.shape)

    def check(self) -> None:
        """On a GPU, where nothing keeps anybody from writing: after each step. Raises HeldBaseError
        when a part of the base has changed, or its owner has ended."""
        if isinstance(self.store, Mapped):
            self.store.check()

    def part(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """This rank's part `[experts, rows, columns]` of a stack. Raises HeldBaseError when it is
        not on this rank's GPU, and when it is not `like` what the model has, but for the dtype of
        scales."""
        stack = self.stacks[name]
        (mine,) = self.store.part(stack.name, trainer_part(stack, self.shape, self.at))
        if mine.shape != like.shape or (mine.dtype != like.dtype and not stack.scales):
            raise HeldBaseError(
                f"{name} is {tuple(like.shape)} {like.dtype}, and what is held of it "
                f"{tuple(mine.shape)} {mine.dtype}"
            )
        return mine

    def box(self, one: Dense, modules: Sequence[str] = ()) -> Box:
        """Which part of a tensor `[rows, columns]` is this rank's; see `trainer_part`."""
        return trainer_part(one, self.shape, self.at, modules)


def _here() -> RankLayout:
    """This rank's place among those that Megatron has made groups of."""
    return RankLayout(
        tp=(ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()),
        ep=(ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size()),
        etp=(ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()),
    )
