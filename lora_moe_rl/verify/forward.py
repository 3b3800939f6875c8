"""What transformers computes of a directory, and how far its own float32 is from that: the
reference of `verify export` and `serve-check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.verify.comparisons import ROUNDING, largest_scaled


class Forward:
    """Transformers' model, with an adapter merged by hand or none."""

    def __init__(
        self,
        path: Path,
        spec: AdapterSpec | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
    ):
        from lora_moe_rl.verify import hf

        self._hf, self.single = hf, hf.load(path)
        if spec is not None and tensors is not None:
            hf.merge(self.single, spec, tensors)
        self._exact = hf.load_exact(path, spec, tensors)

    def of(self, sequences: Sequence[Sequence[int]]) -> tuple[list[np.ndarray], float]:
        """Logprobs `[L - 1]` of each in float64, and how far float32 is from them (as
        `largest_scaled`); in float32 and 0 where memory is too small for float64."""
        single = [self._hf.logprobs(self.single, ids) for ids in sequences]
        if self._exact is None:
            return single, 0.0
        exact = self._hf.exact_logprobs(self._exact, sequences)
        return exact, largest_scaled(single, exact)


def allowed(tolerance: float, rounding: float) -> float:
    """The largest error that is allowed, as `largest_scaled` takes errors."""
    return max(tolerance, ROUNDING * rounding)
