"""A recipe: the warm start, whose second trainer rank dies in step 2, once. Of no use without
MARKS: see `dying_trainer.py`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from lora_moe_rl.cluster import trainer
from lora_moe_rl.config.recipes import load_config

ROOT = Path(__file__).parents[2]
config = load_config(str(ROOT / "recipes/tiny_sft.py"))


def dying(worker_class: type, mark: Path) -> type:
    class DyingWorker(worker_class):
        def update(self, batch, routes):
            result = super().update(batch, routes)
            if batch.step == 2 and self.rank == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return result

    return DyingWorker


if "MARKS" in os.environ:
    mark = Path(os.environ["MARKS"]) / "died-in-step-2"
    trainer.LoggedWorker = dying(trainer.LoggedWorker, mark)
