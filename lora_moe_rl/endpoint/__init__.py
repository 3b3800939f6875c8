"""The policy behind an OpenAI-compatible address; what was sampled stays here, token for token."""
