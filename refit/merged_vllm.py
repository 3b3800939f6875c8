"""vLLM's resident weights, replaced in place: linears one at a time, experts one by one.

Everything of vLLM's internals that a merged refit touches stands in this file, which checks at the
start that it is as expected.

A linear goes through vLLM's own reload of that one module, with its sharding and what it does after
loading (the CPU packs weights; MLA takes kv_b_proj apart). vLLM's reload of experts would hold a
layer's experts several times over, and on the CPU leave them unpacked: they take the same steps
here, one expert at a time. That a stack is laid out expert by expert is checked against the
resident weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    convert_to_unquantized_kernel_format,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import layerwise

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit import merged_read
from lora_moe_rl.refit.expert_places import expert_places
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/refit/merged_vllm.py"

# vLLM's names of an expert's gate, up and down
SHARDS = {"w1": "w13_weight", "w3": "w13_weight", "w2": "w2_weight"}
STACKS = ("w13_weight", "w2_weight")


def check_vllm() -> None:
    """Raises ConfigError when the vLLM that is installed is not as this file expects."""
    require_version("vllm", WHO)
    for function, names in (
        (layerwise.initialize_layerwise_reload, ("model",)),
        (layerwise.finalize_layerwise_processing, ("model", "model_config")),
        (
            RoutedExperts.weight_loader,
            ("self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
        ),
        (
            convert_to_unquantized_kernel_format,
            ("unquantized_backend", "moe_config", "w13_weight", "w2_weight", "layer"),
        ),
        (MLAAttention.process_weights_after_loading, ("self", "act_dtype")),
    ):
        require_parameters(function, names, WHO)
    require_attributes(UnquantizedFusedMoEMethod, ("process_weights_after_loading",), WHO)


class Weights:
    """The weights of one worker."""

    def __init__(self, model_runner):
        check_vllm()
        names = ("get_model", "model_config", "vllm_config", "lora_config")
        require_attributes(model_runner, names, WHO)
        if model_runner.lora_config is not None:
            raise RefitError("a merged refit needs an engine without LoRA: its layers are wrapped")
        self.model = model_runner.get_model()
        self.model_config, self.vllm_config = model_runner.model_config, model_runner.vllm_config
        self.dtype: torch.dtype = self.model_config.dtype
        self.device: torch.device = model_runner.device

    def check_linear(self, path: str) -> None:
        """Raises RefitError for a module that is no plain linear."""
        layer = self.model.get_submodule(path)
        if not isinstance(layer, LinearBase) or not isinstance(
            layer.quant_method, UnquantizedLinearMethod
        ):
            raise RefitError(
                f"{path}: vLLM holds it as {type(layer).__name__} with "
                f"{type(getattr(layer, 'quant_method', None)).__name__}, and {WHO} knows "
                "unquantised linears alone"
            )
        require_attributes(layer, merged_read.LAYER, WHO)
        for attention in self._absorbing(layer):
            if attention.is_amx_bmm_enabled:
                raise RefitError(
                    f"{path}: vLLM packs it for AMX and drops it, and its reload knows nothing of "
                    "that; leave kv_b_proj out of adapter.targets on this CPU"
                )
            require_attributes(attention, merged_read.ATTENTION, WHO)

    @torch.no_grad()
    def load_linear(self, path: str, weights: list[tuple[str, torch.Tensor]]) -> None:
        """All weights of a module, whole and under the checkpoint's names. Raises RefitError when
        vLLM did not take all that it wanted."""
        layer = self.model.get_submodule(path)
        with set_current_vllm_config(self.vllm_config):
            layerwise.initialize_layerwise_reload(layer)
            info = layerwise.get_layerwise_info(layer)
            try:
                self.model.load_weights(iter(weights))
                if info.can_load():
                    names = ", ".join(name for name, _ in weights)
                    raise RefitError(
                        f"{path}: vLLM took {info.load_numel} of {info.load_numel_total} elements "
                        f"from {names}"
                    )
            finally:
                if info.can_load():  # as it was: half a module must not wait for the next one
                    info.loaded_weights.clear()
                    info.load_numel = 0
                layerwise.finalize_layerwise_processing(layer, self.model_config)
            for attention in self._absorbing(layer):
                attention.process_weights_after_loading(self.dtype)

    def linear_holds(self, path: str, weights: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Whether a module computes with what `load_linear` would write of these, to the bit."""
        layer, found = self.model.get_submodule(path), dict(weights)
        biases = [value for name, value in found.items() if name.endswith(".bias")]
        whole = [
            value.to(self.device, self.dtype)
            for name, value in found.items()
            if name.endswith(".weight")
        ]
        local = merged_read.local_weight(layer, whole)
        if not merged_read.computes(layer, local):
            return False
        if not merged_read.adds(layer, biases, self.dtype):
            return False
        return all(merged_read.absorbs(one, local) for one in self._absorbing(layer))

    def experts(self, path: str) -> Experts:
        return Experts(path, self.model.get_submodule(path).routed_experts, self)

    def _absorbing(self, layer: torch.nn.Module) -> list[MLAAttention]:
        """The attention that holds products of its own of a kv_b_proj."""
        modules = self.model.modules()
        return [m for m in modules if isinstance(m, MLAAttention) and m.kv_b_proj is layer]


class Experts:
    """The routed experts of a layer, as far as this worker holds them."""

    def __init__(self, path: str, layer: RoutedExperts, weights: Weights):
        self.path, self.layer = path, layer
        method = layer.quant_method
        if isinstance(method, FusedMoEModularMethod):
            method = method.old_quant_method
        if (
            not isinstance(method, UnquantizedFusedMoEMethod)
            or method.unquantized_backend == UnquantizedMoeBackend.MOONEP
            or method.moe.has_bias
        ):
            raise RefitError(
                f"{path}: {WHO} does not know how vLLM lays out experts with "
                f"{type(method).__name__}, {getattr(method, 'unquantized_backend', None)}"
            )
        self.method: UnquantizedFusedMoEMethod = method
        # One expert as it is loaded; seen as a stack of that one, again and again.
        loaded, _ = layerwise.get_layerwise_info(layer).restore_metadata
        self.window: dict[str, torch.Tensor] = {}
        self.stacks: dict[str, torch.nn.Parameter] = {}
        for name in STACKS:
            shape = loaded[name].shape
            one = torch.zeros(1, *shape[1:], dtype=loaded[name].dtype, device=weights.device)
            self.window[name] = one
            self.stacks[name] = torch.nn.Parameter(one.expand(shape), requires_grad=False)
        self.places = expert_places(layer)

    def write(self, expert: int, shards: dict[str, torch.Tensor]) -> None:
        """`shards`: gate, up and down as w1, w3, w2 `[out, in]`, whole."""
        for name, value in self._laid_out(expert, shards).items():
            getattr(self.layer, name).data[self.places[expert]].copy_(value)

    def holds(self, expert: int, shards: dict[str, torch.Tensor]) -> bool:
        """Whether what is resident is what `write` would write."""
        for name, value in self._laid_out(expert, shards).items():
            resident = getattr(self.layer, name).data
            if resident.shape[1:] != value.shape:
                return False
            if not torch.equal(resident[self.places[expert]], value):
                return False
        return True

    @torch.no_grad()
    def _laid_out(self, expert: int, shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This worker's part of an expert as its kernel reads it."""
        for shard, stack in SHARDS.items():
            if not self.layer.weight_loader(
                self.stacks[stack], shards[shard], stack, shard, expert, return_success=True
            ):
                raise RefitError(f"{self.path}: vLLM did not take {shard} of expert {expert}")
        # The layer, but for its weights: those of one expert.
        one = copy.copy(self.layer)
        one._parameters = {
            name: torch.nn.Parameter(value.clone(), requires_grad=False)
            for name, value in self.window.items()
        }
        w13, w2 = convert_to_unquantized_kernel_format(
            self.method.unquantized_backend,
            moe_config=self.layer.moe_config,
            w13_weight=one.w13_weight,
            w2_weight=one.w2_weight,
            layer=one,
        )
        for name, value in zip(STACKS, (w13, w2), strict=True):
            one._parameters[name] = torch.nn.Parameter(value.data, requires_grad=False)
        self.method.moe_kernel.fused_experts.process_weights_after_loading(one)
        return {name: getattr(one, name).data[0] for name in STACKS}
