"""What the tests of a base that is held once ask of both sides."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.verify.engine import EngineProcess


def scores_of(engine: EngineProcess, sequences) -> list[np.ndarray]:
    engine.start()
    return engine.ask("score", sequences, None)[0]


def assert_close(ours, theirs, tolerance, relative=False) -> None:
    for a, b in zip(ours, theirs, strict=True):
        largest = np.abs(b).max() if relative else 1.0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(largest, 1e-30))
