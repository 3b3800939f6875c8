"""How a part of an adapter version gets from a trainer rank into an engine worker: a file each.

A transport only moves bytes. What the bytes are, and the checks of them, are the same for all: see
`refit/parts.py`.
"""
