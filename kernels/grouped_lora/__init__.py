"""LoRA of stacked experts, for tokens sorted by expert: forward and gradients without a loop over
experts on the host."""

from lora_moe_rl.kernels.grouped_lora.op import grouped_lora

__all__ = ["grouped_lora"]
