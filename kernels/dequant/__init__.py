"""Quantised weights made into numbers again, in a buffer that is reused."""

from lora_moe_rl.kernels.dequant.formats import FORMS, Form, Packed
from lora_moe_rl.kernels.dequant.op import dequantise, dequantise_

__all__ = ["FORMS", "Form", "Packed", "dequantise", "dequantise_"]
