"""Rollouts: vLLM engines in Ray actors."""
