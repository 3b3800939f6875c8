"""Tiny Mixture-of-Experts models that are made on the spot, and where a model's directory is."""
