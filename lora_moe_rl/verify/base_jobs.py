"""What a trainer rank is asked by `verify base`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lora_moe_rl.adapters.shards import Shard
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.router_replay.table import RouteTable


def logprobs_and_gradients(
    worker,
    spec: AdapterSpec,
    adapter: Mapping[str, np.ndarray],
    batch: TrainBatch,
    table: RouteTable,
) -> tuple[list[np.ndarray], list[Shard]]:
    worker.set_adapter(adapter)
    _, _, shards = worker.gradients(batch, table)
    return worker.engine.score(batch, table), shards
