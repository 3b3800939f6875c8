"""Moving an adapter version from the trainer into vLLM."""
