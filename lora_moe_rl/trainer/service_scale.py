"""The scale of a service's model of a lower rank than its place. Pure: imports no torch."""

from __future__ import annotations

import math


def factor_of(rank: int, whole: int, rslora: bool) -> float:
    """The factor of a model of `rank` in places of rank `whole`: what makes alpha / whole to alpha
    / rank."""
    return math.sqrt(whole / rank) if rslora else whole / rank
