"""Samples that begin alike: a micro-batch computes their prompt once.

    tokens     p0 p1 p2 a0 a1          p0 p1 p2 b0 b1 b2        two samples of a prompt
    fed        p0 p1 p2 a0                      b0 b1           b0 reads the keys of p0, p1 and p2

Nothing in a forward tells their prompts apart: the tokens are the same, and so are the experts that
the rollout sent them to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.data.samples import Sample


def alike(groups: Sequence[Sequence[Sample]]) -> np.ndarray:
    """int64 `[n]`, of the samples of all groups in turn the number of the first one of its group
    that has the same prompt on the same routes: its own where it is the first. A sample that is fed
    in parts, or that has nothing after its prompt, is like no other."""
    found: list[int] = []
    for samples in groups:
        firsts: dict[tuple[bytes, bytes], int] = {}
        for sample in samples:
            number = len(found)
            if sample.splits or not len(sample.response_ids):
                found.append(number)
                continue
            key = sample.prompt_ids.tobytes(), sample.prompt_routes
            found.append(firsts.setdefault(key, number))
    return np.array(found, dtype=np.int64)


def followers(alike: np.ndarray, samples: Sequence[int] | np.ndarray) -> dict[int, int]:
    """Of samples that are packed together, those whose prompt one before them has fed, and which
    one that is."""
    leaders: dict[int, int] = {}
    found = {}
    for sample, first in zip(samples, alike[np.asarray(samples, np.int64)].tolist(), strict=True):
        if first in leaders:
            found[int(sample)] = leaders[first]
        else:
            leaders[first] = int(sample)
    return found
