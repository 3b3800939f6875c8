"""Advantages of the samples of a step, one file each."""
