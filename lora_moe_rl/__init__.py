"""Reinforcement learning of Mixture-of-Experts models by training only LoRA adapters."""

__version__ = "0.1.0"
