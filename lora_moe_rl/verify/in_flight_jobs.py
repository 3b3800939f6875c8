"""What a trainer rank is asked by `verify async`: jobs of `verify.ranks.Ranks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.router_replay.table import RouteTable

_senders: list = []  # whose memory engines still read, when the next one sends


def send(
    worker,
    spec: AdapterSpec,
    tensors: Mapping[str, np.ndarray],
    version: int,
    layouts: list[PartLayout],
    channel: Channel,
) -> SentPart:
    """An adapter as `version`."""
    worker.set_adapter(tensors)
    worker.engine.version = version
    worker.prepare_refit(layouts, channel)
    _senders.append(worker.sender)
    return worker.send()


def score(
    worker,
    spec: AdapterSpec,
    adapters: Sequence[Mapping[str, np.ndarray]],
    batch: TrainBatch,
    table: RouteTable,
) -> list[list[np.ndarray]]:
    """The logprobs, by each adapter, of the samples' tokens after their prompts, on these
    routes."""
    found = []
    for tensors in adapters:
        worker.set_adapter(tensors)
        found.append(worker.engine.score(batch, table))
    return found
