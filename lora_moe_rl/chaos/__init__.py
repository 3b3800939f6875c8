"""`lora-moe-rl chaos`: faults are brought about in a run, and what becomes of it is compared with
what docs/faults.md promises."""
