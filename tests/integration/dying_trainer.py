"""A recipe: the demo, whose trainer ranks die in step 2, hang in step 3 and die in the proof of
version 4, once each. The file is of no use without MARKS, a folder in which each fault leaves a
mark."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from lora_moe_rl.cluster import trainer
from lora_moe_rl.config.recipes import load_config

ROOT = Path(__file__).parents[2]
config = load_config(str(ROOT / "recipes/tiny_arithmetic.py"))


def dying(worker_class: type, marks: Path) -> type:
    class DyingWorker(worker_class):
        def _fault(self, name: str, number: int) -> None:
            mark = marks / name
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), number)

        def update(self, batch, routes):
            if batch.step == 3 and self.rank == 0:
                self._fault("hung-in-step-3", signal.SIGSTOP)
            result = super().update(batch, routes)
            if batch.step == 2 and self.rank == 1:  # the step was applied
                self._fault("died-in-step-2", signal.SIGKILL)
            return result

        def score(self, sequences, table, adapters):
            if self.engine.version == 4 and self.rank == 0:
                self._fault("died-in-the-proof", signal.SIGKILL)
            return super().score(sequences, table, adapters)

    return DyingWorker


if "MARKS" in os.environ:
    trainer.LoggedWorker = dying(trainer.LoggedWorker, Path(os.environ["MARKS"]))
