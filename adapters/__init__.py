"""What a LoRA adapter is: sites, canonical tensors, Megatron layers, sharding, PEFT files."""
