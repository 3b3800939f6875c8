"""Mend for vLLM on the CPU: FP8 bases in blocks of 128 x 128, with LoRA.

vLLM's FP8 kernels on the CPU take AMX, bfloat16 and no LoRA. Here: routed experts as the checkpoint
has them, an expert dequantised when tokens go to it, and dense linears dequantised once they are
loaded. Activations are not quantised, unless the run says so (trainer.fp8_forward=engine): then as
vLLM does on GPUs, for what the base's weights read, but not for MLA's kv_b, whose weights vLLM
multiplies into its neighbours when it decodes.
"""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import fp8_w8a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.fp8 import (
    Fp8Config,
    Fp8LinearMethod,
    Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Static128BlockSym
from vllm.model_executor.utils import replace_parameter

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.kernels.dequant import Packed, dequantise
from lora_moe_rl.kernels.fp8_rounding import rounded
from lora_moe_rl.rollout.cpu_experts import TorchLoRAExperts
from lora_moe_rl.rollout.device import FP8_ACTIVATIONS
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_fp8.py"


class Fp8LoRAExperts(TorchLoRAExperts):
    """w1 and w2 are float8_e4m3fn `[E, out, in]`."""

    def weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Packed, Packed]:
        assert self.w1_scale is not None and self.w2_scale is not None
        return Packed("fp8", w1, self.w1_scale), Packed("fp8", w2, self.w2_scale)


class RoundingLoRAExperts(Fp8LoRAExperts):
    def activations(self, x: torch.Tensor) -> torch.Tensor:
        return rounded(x)


class DequantisedExperts(Fp8MoEMethod):
    def get_fused_moe_quant_config(self, layer: torch.nn.Module):
        """Of weights alone, where upstream would quantise activations too."""
        return fp8_w8a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale_inv,
            w2_scale=layer.w2_weight_scale_inv,
            block_shape=self.moe_block_shape,
        )


class RoundingLinearMethod(UnquantizedLinearMethod):
    def apply(self, layer, x, bias=None):
        return super().apply(layer, rounded(x), bias)


class DequantisedLinear(Fp8LinearMethod):
    """Loads FP8, and is an unquantised linear from then on."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed = Packed("fp8", layer.weight.data, layer.weight_scale_inv.data)
        replace_parameter(layer, "weight", dequantise(packed, layer.orig_dtype))
        del layer.weight_scale_inv
        rounds = _quantises_activations() and not layer.prefix.endswith(".kv_b_proj")
        layer.quant_method = RoundingLinearMethod() if rounds else UnquantizedLinearMethod()
        layer.quant_method.process_weights_after_loading(layer)


def _quantises_activations() -> bool:
    """Whether the engine that is being made does."""
    return bool(get_current_vllm_config().additional_config.get(FP8_ACTIVATIONS))  # pyright: ignore


def install() -> None:
    """Makes vLLM serve FP8 bases by these classes wherever LoRA is on."""
    require_version("vllm", WHO)
    if fp8.Fp8MoEMethod is DequantisedExperts:
        return  # installed already: a process may load its plugins twice
    require_attributes(fp8, ("init_fp8_linear_kernel", "select_fp8_moe_backend"), WHO)
    names = ("self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition")
    require_parameters(Fp8MoEMethod.create_weights, names, WHO)
    stock = fp8.select_fp8_moe_backend

    def select(config, weight_key, *args, **kwargs):
        if not config.is_lora_enabled:
            return stock(config, weight_key, *args, **kwargs)
        if weight_key != kFp8Static128BlockSym:
            raise ConfigError(f"{WHO} serves LoRA on FP8 in whole blocks of 128 x 128 alone")
        experts = RoundingLoRAExperts if _quantises_activations() else Fp8LoRAExperts
        return Fp8MoeBackend.TRITON, experts  # whose weights stay as they are

    fp8.select_fp8_moe_backend = select
    fp8.init_fp8_linear_kernel = lambda **_: None
    fp8.Fp8MoEMethod, fp8.Fp8LinearMethod = DequantisedExperts, DequantisedLinear
    Fp8Config.get_supported_act_dtypes = classmethod(
        lambda cls: [torch.float32, torch.bfloat16, torch.half]
    )
