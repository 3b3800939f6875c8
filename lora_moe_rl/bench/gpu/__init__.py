"""`lora-moe-rl bench gpu`: all that wants a GPU, in stages that do not depend on each other."""
