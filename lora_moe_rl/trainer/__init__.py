"""The training engine: real Megatron-core models with LoRA adapters, one Ray actor a rank."""
