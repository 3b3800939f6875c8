"""A trainer rank as it stands in a process of Ray's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lora_moe_rl.cluster.log import redirect
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.trainer.worker import TrainerWorker

if TYPE_CHECKING:
    from lora_moe_rl.router_replay.routes import Sent


class LoggedWorker(TrainerWorker):
    """A rank whose output goes to its log file, in an environment of its own. It sets that itself,
    before torch is imported: for Ray's own way of setting it a process is started anew."""

    def __init__(self, log_path: str, environment: dict[str, str], *args: Any):
        redirect(log_path)
        os.environ |= environment
        super().__init__(*args)

    def update(self, batch: TrainBatch, routes: list[Sent]) -> UpdateResult:
        """`routes` come as one object: there are as many as groups."""
        return super().update(batch, *routes)
