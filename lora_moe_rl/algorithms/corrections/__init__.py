"""What a token weighs because the engine sampled it, not the trainer: one file each."""
