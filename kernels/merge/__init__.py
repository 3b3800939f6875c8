"""Adapters merged into base weights, of stacked experts or dense, quantised ones too."""

from lora_moe_rl.kernels.merge.op import (
    merge_delta_,
    merge_delta_fp8_,
    merge_delta_int4_,
    merge_rounded,
)

__all__ = ["merge_delta_", "merge_delta_fp8_", "merge_delta_int4_", "merge_rounded"]
