"""The trainer's side: a model's frozen experts become views of the store.

Each stack is compared with the private one, bit for bit, before that is let go: both were read
from the checkpoint, by Megatron-Bridge and by us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state as ps

from lora_moe_rl.base.held import Held
from lora_moe_rl.base.layout import ExpertCut, Stack
from lora_moe_rl.base.store import Store
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.upstream.checks import require_attributes

WHO = "lora_moe_rl/base/adopt.py"
BITS = {4: torch.int32, 2: torch.int16}


def adopt(chunks: Sequence[torch.nn.Module], config: TrainerConfig, held: Held) -> Store:
    """Re-points this rank's routed experts at `held`. `chunks`: the model's, of this rank. Raises
    HeldBaseError when a value differs, something of it is trained, or the model is on a GPU."""
    if next(chunks[0].parameters()).device.type != "cpu":
        raise HeldBaseError(
            "a base is held once on the CPU alone, and this trainer is on a GPU; set "
            "model.held_once=off"
        )
    store, cut = held.open(), ExpertCut.of_trainer(config)
    if cut.pieces != held.cut.pieces:
        raise HeldBaseError(
            f"trainer.etp={cut.pieces} cuts each expert into other pieces than the engine, "
            f"{held.cut.pieces}; set model.held_once=off"
        )
    stacks = {stack.megatron: stack for stack in held.stacks()}
    for name, linear in _grouped_linears(chunks):  # of this stage
        _adopt(linear, stacks[name], _mine(store[stacks[name].name], cut))
    ctypes.CDLL(None).malloc_trim(0)  # else what was let go may stay with this process
    return store


def _grouped_linears(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The experts of all layers of this rank, by Megatron's name with the global layer."""
    for chunk in chunks:
        for layer in getattr(chunk, "module", chunk).decoder.layers:
            experts = getattr(layer.mlp, "experts", None)
            for name in ("linear_fc1", "linear_fc2") if experts is not None else ():
                module = getattr(experts, name)
                module = getattr(module, "base", module)  # behind its adapters
                require_attributes(module, ("stacked", "num_gemms"), WHO)
                yield f"decoder.layers.{layer.layer_number - 1}.mlp.experts.{name}", module


def _mine(whole: torch.Tensor, cut: ExpertCut) -> torch.Tensor:
    """This rank's part `[experts, rows, columns]` of a stack."""
    part = whole[ps.get_expert_tensor_parallel_rank()]
    each = len(part) // cut.ranges
    return part.narrow(0, ps.get_expert_model_parallel_rank() * each, each)


def _adopt(linear: torch.nn.Module, stack: Stack, shared: torch.Tensor) -> None:
    private = linear.stacked
    weights = [getattr(linear, f"weight{i}") for i in range(linear.num_gemms)]
    if private.requires_grad or any(weight.requires_grad for weight in weights):
        raise HeldBaseError(f"{stack.megatron} is trained: it must not be shared")
    if private.shape != shared.shape or private.dtype != shared.dtype:
        raise HeldBaseError(
            f"{stack.megatron} is {tuple(private.shape)} {private.dtype}, and what is held of it "
            f"{tuple(shared.shape)} {shared.dtype}"
        )
    if not same_bits(private, shared):
        raise HeldBaseError(
            f"{stack.megatron}: Megatron-Bridge has loaded other values than are held for both; "
            "set model.held_once=off"
        )
    linear.stacked = shared
    for i, weight in enumerate(weights):
        weight.data = shared[i]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
