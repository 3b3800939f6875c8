"""`lora-moe-rl verify`: shows on the user's own model that the trained function is the same under
every layout. `layout.py` is the command."""
