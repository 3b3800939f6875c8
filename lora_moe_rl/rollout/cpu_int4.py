"""Mend for vLLM on the CPU: LoRA on the routed experts of an INT4 base.

vLLM's kernels for INT4 experts on the CPU know no LoRA, and take AMX. Here: the experts class of
`cpu_experts.py` over weights that stay as the checkpoint has them (`w13_weight_packed`), an expert
dequantised when tokens go to it. vLLM loads them itself; its loader for Triton keeps their bytes.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as method,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.kernels.dequant import Packed
from lora_moe_rl.rollout.cpu_experts import TorchLoRAExperts
from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_int4.py"


class Int4LoRAExperts(TorchLoRAExperts):
    """w1 and w2 come as bytes `[E, out, in / 2]`."""

    def weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Packed, Packed]:
        assert self.w1_scale is not None and self.w2_scale is not None
        return (
            Packed("int4", w1.view(torch.int32), self.w1_scale),
            Packed("int4", w2.view(torch.int32), self.w2_scale),
        )


def install() -> None:
    """Makes vLLM pick this class for INT4 experts wherever LoRA is on."""
    require_version("vllm", WHO)
    stock_select, stock_make = method.select_wna16_moe_backend, method.make_wna16_moe_kernel
    if stock_select.__module__ == __name__:
        return  # installed already: a process may load its plugins twice
    names = ("config", "weight_key", "quant_config", "may_have_zp", "may_have_bias")
    require_parameters(stock_select, names, WHO)
    names = ("moe_quant_config", "moe_config", "experts_cls", "backend", "routing_tables")
    require_parameters(stock_make, names, WHO)

    def select(config, weight_key, *args, **kwargs):
        if not config.is_lora_enabled:
            return stock_select(config, weight_key, *args, **kwargs)
        if weight_key != kInt4Static32:
            raise ConfigError(f"{WHO} serves LoRA on INT4 in symmetric groups of 32 alone")
        return WNA16MoEBackend.TRITON, Int4LoRAExperts

    def make(moe_quant_config, moe_config, experts_cls, backend, routing_tables):
        if experts_cls is not Int4LoRAExperts:
            return stock_make(moe_quant_config, moe_config, experts_cls, backend, routing_tables)
        prepare_finalize = maybe_make_prepare_finalize(
            moe=moe_config,
            quant_config=moe_quant_config,
            routing_tables=routing_tables,
            allow_new_interface=True,
            use_monolithic=False,
        )
        assert prepare_finalize is not None
        experts = experts_cls(moe_config=moe_config, quant_config=moe_quant_config)
        return modular_kernel.FusedMoEKernel(prepare_finalize, experts)

    method.select_wna16_moe_backend, method.make_wna16_moe_kernel = select, make
