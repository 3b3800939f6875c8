"""What moves in a step, and where prompts come from."""
