"""Adapters in and out: other tools' files, merged checkpoints, other ranks."""
