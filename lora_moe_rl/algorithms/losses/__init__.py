"""Losses of single tokens, one file each."""
