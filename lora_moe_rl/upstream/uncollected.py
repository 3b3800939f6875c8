"""Imports of what is large, with Python's collector of cycles at rest.

torch, Megatron, vLLM and transformers make some hundred thousands of objects at their import, few
of them garbage; the collector walks through all of them again and again as they grow, for a fourth
of what a trainer rank's imports take.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector rests within it, in all threads, and leaves what is there by then alone for
    ever. For imports, and not for what makes cycles that hold much. One within another adds
    nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
