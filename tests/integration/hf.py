"""The Hugging Face reference, as `verify layout` uses it."""

from lora_moe_rl.verify.hf import load, logprobs, merge

__all__ = ["load", "logprobs", "merge"]
