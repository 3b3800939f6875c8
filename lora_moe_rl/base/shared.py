"""The trainer's side: what a rank takes of the store in place of a copy of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state as ps

from lora_moe_rl.base.dense import Dense, apart
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.ipc import Cuda
from lora_moe_rl.base.ipc_store import Mapped
from lora_moe_rl.base.layout import ExpertCut, Stack
from lora_moe_rl.base.store import Store
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.refit.merged_base import Base


@dataclass(frozen=True)
class Shared:
    """The store of a run, as trainer ranks cut it."""

    held: Held
    store: Store | Mapped
    cut: ExpertCut
    stacks: dict[str, Stack]  # by Megatron's name of the module
    dense: dict[str, Dense]  # by vLLM's name; what trainer ranks can take

    @classmethod
    def of(cls, held: Held, config: TrainerConfig, device: str) -> Shared:
        """Writes the store if nobody has; on a GPU maps what an engine has shared. Raises
        HeldBaseError where ranks cannot hold it."""
        if held.gpu != (device == "cuda"):
            raise HeldBaseError(
                f"the base is held on the {'GPU' if held.gpu else 'CPU'}, and this trainer is on "
                f"{device}; set model.held_once=off"
            )
        cut = ExpertCut.of_trainer(config)
        if cut.pieces != held.cut.pieces:
            raise HeldBaseError(
                f"trainer.etp={cut.pieces} cuts each expert into other pieces than the engine, "
                f"{held.cut.pieces}; set model.held_once=off"
            )
        stacks = {stack.megatron: stack for stack in held.stacks()}
        base = Base(held.model_dir)
        dense = {
            name: one
            for name, one in held.dense(base).items()
            if not apart(one, base.shape, config.tp, held.tp)
        }
        base.weights.close()
        store = held.map(Cuda()) if held.gpu else held.open()
        return cls(held, store, cut, stacks, dense)

    def check(self) -> None:
        """On a GPU, where nothing keeps anybody from writing: after each step. Raises HeldBaseError
        when a part of the base has changed, or its owner has ended."""
        if isinstance(self.store, Mapped):
            self.store.check()

    def part(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """This rank's part `[experts, rows, columns]` of a stack. Raises HeldBaseError when it is
        not `like` what the model has, but for the dtype of scales."""
        stack = self.stacks[name]
        whole = self.store[stack.name][ps.get_expert_tensor_parallel_rank()]
        each = len(whole) // self.cut.ranges
        mine = whole.narrow(0, ps.get_expert_model_parallel_rank() * each, each)
        if mine.shape != like.shape or (mine.dtype != like.dtype and not stack.scales):
            raise HeldBaseError(
                f"{name} is {tuple(like.shape)} {like.dtype}, and what is held of it "
                f"{tuple(mine.shape)} {mine.dtype}"
            )
        return mine
