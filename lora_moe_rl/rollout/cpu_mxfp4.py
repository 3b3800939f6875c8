"""Mend for vLLM on the CPU: LoRA on the routed experts of an MXFP4 base.

vLLM serves compressed-tensors' MXFP4 experts by kernels of GPUs alone, for which it lays them out
anew. Here: the experts class of `cpu_experts.py` over weights that stay as the checkpoint has them,
an expert dequantised when tokens go to it. Activations are not quantised.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as method,
)

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.kernels.dequant import Packed
from lora_moe_rl.rollout.cpu_experts import TorchLoRAExperts
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_mxfp4.py"
Stock = method.CompressedTensorsW4A4Mxfp4MoEMethod


class Mxfp4LoRAExperts(TorchLoRAExperts):
    """w1 and w2 come as bytes `[E, out, in / 2]`."""

    def weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Packed, Packed]:
        return _packed(w1, self.w1_scale), _packed(w2, self.w2_scale)


def _packed(data: torch.Tensor, scales: torch.Tensor | None) -> Packed:
    assert scales is not None
    return Packed("mxfp4", data.view(*scales.shape, -1), scales)


class PackedMxfp4Experts(Stock):
    """Loads as upstream does, and leaves what it has loaded as it is."""

    def __init__(self, moe):
        if not moe.is_lora_enabled:
            raise ConfigError(f"{WHO} serves MXFP4 experts with LoRA alone")
        super().__init__(moe)
        self.experts_cls = Mxfp4LoRAExperts

    def get_fused_moe_quant_config(self, layer: torch.nn.Module):
        return mxfp4_w4a16_moe_quant_config(layer.w13_weight_scale, layer.w2_weight_scale)

    def process_weights_after_loading(self, layer) -> None:
        for name in ("w13_weight", "w2_weight"):
            packed = getattr(layer, f"{name}_packed").data
            setattr(layer, name, torch.nn.Parameter(packed, requires_grad=False))
            delattr(layer, f"{name}_packed")
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_finalize = maybe_make_prepare_finalize(
            moe=self.moe,
            quant_config=self.moe_quant_config,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
            use_monolithic=False,
        )
        assert prepare_finalize is not None
        experts = self.experts_cls(moe_config=self.moe, quant_config=self.moe_quant_config)
        self.moe_kernel = modular_kernel.FusedMoEKernel(prepare_finalize, experts)


def install() -> None:
    """Makes vLLM serve MXFP4 experts by this class."""
    require_version("vllm", WHO)
    if method.CompressedTensorsW4A4Mxfp4MoEMethod is PackedMxfp4Experts:
        return  # installed already: a process may load its plugins twice
    require_attributes(Stock, ("create_weights", "apply"), WHO)
    require_parameters(Stock.process_weights_after_loading, ("self", "layer"), WHO)
    method.CompressedTensorsW4A4Mxfp4MoEMethod = PackedMxfp4Experts
