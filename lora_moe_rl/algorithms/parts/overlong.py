"""What a reward loses for a response that comes near the longest one (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

import numpy as np


def soft_punishment(
    lengths: np.ndarray, max_response_tokens: int, buffer: int, penalty: float
) -> np.ndarray:
    """float64 [n], from 0 at `buffer` tokens before the longest response down to -penalty at it.

    lengths: int [n], tokens of each response.
    """
    into_buffer = (lengths - (max_response_tokens - buffer)) / buffer
    return -penalty * np.clip(into_buffer, 0.0, 1.0)
