"""vLLM's adapter slots: the buffers that its LoRA kernels read, and which version is in which.

Everything of vLLM's internals that a refit touches stands in this file, which checks at the start
that it is as expected. vLLM itself can only load an adapter from disk; a registered id, however, is
never loaded, so that filling a slot's buffers and registering its id is enough. vLLM's ids start at
1: the id of version v is v + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager

from lora_moe_rl.adapters.families import FAMILIES
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.expert_places import expert_places
from lora_moe_rl.rollout.facts import Matrix
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/refit/slots.py"

GATE, DOWN, UP = range(3)  # slices of routed experts
INTERLEAVED = tuple(name for name, family in FAMILIES.items() if family.experts == "interleaved")


def _interleaved(layer: FusedMoE3DWithLoRA, slice_: int, matrix: Matrix) -> torch.Tensor:
    """Gate's or up's part of a slot that has both in one, of models whose rows are gate's and up's
    in turn: the first half of the slot's rank is gate's, the other one up's. What is neither's
    stays zero."""
    if layer._base_model not in INTERLEAVED:
        raise RefitError(f"{WHO} does not know in which order {layer._base_model} has gate and up")
    first = 0 if slice_ == GATE else 1
    if matrix == "A":
        return layer.w13_lora_a_stacked[0].chunk(2, dim=2)[first]
    return layer.w13_lora_b_stacked[0][:, :, first::2].chunk(2, dim=3)[first]


def lora_id(version: int) -> int:
    """vLLM's id of an adapter version: vLLM wants ids above 0."""
    return version + 1


def check_vllm() -> None:
    """Raises ConfigError when the vLLM that is installed is not as this file expects."""
    require_version("vllm", WHO)
    require_parameters(LoRAModel.__init__, ("self", "lora_model_id", "rank", "loras"), WHO)
    for layer in (BaseLinearLayerWithLoRA, FusedMoEWithLoRA):
        require_parameters(layer.reset_lora, ("self", "index"), WHO)
    names = ("activate_adapter", "remove_adapter", "deactivate_adapter", "lora_slots", "capacity")
    require_attributes(LoRAModelManager, names, WHO)


class Slots:
    """The slots of one worker. A slot that no id is entered for is read by no request."""

    def __init__(self, manager: LRUCacheLoRAModelManager):
        check_vllm()
        names = (
            "_registered_adapters",
            "_active_adapters",
            "lora_index_to_id",
            "modules",
            "device",
        )
        require_attributes(manager, names, WHO)
        self.manager = manager
        self.clean: set[int] = set()  # slots that hold nothing but what we write each time

    @property
    def modules(self) -> list[str]:
        return list(self.manager.modules)

    @property
    def dtype(self) -> torch.dtype:
        return self.manager.lora_config.lora_dtype

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self.manager.device

    def buffer(self, module: str, slice_: int, matrix: Matrix) -> torch.Tensor:
        """The buffer of all slots: `[slots, r, in]` or `[slots, out, r]`, with the worker's experts
        (one for a tensor that vLLM shares) before r and out."""
        layer = self.manager.modules[module]
        if isinstance(layer, FusedMoEWithLoRA):
            kind = "a" if matrix == "A" else "b"
            if slice_ == DOWN:
                return getattr(layer, f"w2_lora_{kind}_stacked")[0]
            if isinstance(layer, FusedMoE3DWithLoRA):
                return _interleaved(layer, slice_, matrix)
            return getattr(layer, f"w13_lora_{kind}_stacked")[0 if slice_ == GATE else 1]
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            raise RefitError(
                f"{module}: vLLM serves it as {type(layer).__name__}, unknown to {WHO}"
            )
        stacked = layer.lora_a_stacked if matrix == "A" else layer.lora_b_stacked
        return stacked[slice_].squeeze(1)

    def experts(self, module: str) -> dict[int, int]:
        """The experts of a module: `{global_expert: its place in the slots' buffers}`."""
        return expert_places(self.manager.modules[module].base_layer.routed_experts)

    def versions(self) -> dict[int, int]:
        """`{version: slot}` of the slots in use."""
        ids = self.manager.lora_index_to_id
        return {number - 1: slot for slot, number in enumerate(ids) if number is not None}

    def free(self, version: int) -> int:
        """A slot that no version is in, its buffers zero where a refit does not write. vLLM by
        itself would evict the version used longest ago: never let it come to that."""
        ids = self.manager.lora_index_to_id
        if None not in ids or len(self.manager) >= self.manager.capacity:
            raise RefitError(
                f"no free slot for adapter version {version}: slots hold the versions "
                f"{sorted(self.versions())}"
            )
        slot = ids.index(None)
        if slot not in self.clean:
            for layer in self._layers():
                layer.reset_lora(slot)
            self.clean.add(slot)
        return slot

    def enter(self, version: int, slot: int) -> None:
        """From now on requests for `version` are served from `slot`."""
        for layer in self._layers():
            if isinstance(layer, FusedMoEWithLoRA):
                layer.adapter_enabled[slot] = 1
        number, rank = lora_id(version), self.manager.lora_config.max_lora_rank
        self.manager._registered_adapters[number] = LoRAModel(number, rank, {})
        self.manager._active_adapters[number] = None
        self.manager.lora_index_to_id[slot] = number

    def drop(self, version: int) -> bool:
        """Whether it was there."""
        return self.manager.remove_adapter(lora_id(version))

    def _layers(self) -> Iterator[Any]:
        yield from self.manager.modules.values()
