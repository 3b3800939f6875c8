"""How a prompt becomes samples with rewards: one file an environment."""
