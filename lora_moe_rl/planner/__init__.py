"""Memory, traffic and time of a run, computed from the model's config alone: no torch, no GPU."""
