"""What a trainer rank is asked by `verify refit`: jobs of `verify.ranks.Ranks`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.router_replay.table import RouteTable


def place(worker, spec: AdapterSpec) -> str:
    return transports.place()


def set_adapter(worker, spec: AdapterSpec, tensors: Mapping[str, np.ndarray]) -> None:
    worker.set_adapter(tensors)


def send(
    worker, spec: AdapterSpec, version: int, layouts: list[PartLayout], channel: Channel
) -> SentPart | None:
    """This rank's part of the adapter as `version`, if the plan wants one of it."""
    worker.engine.version = version
    worker.prepare_refit(layouts, channel)
    if worker.rank not in {layout.source for layout in layouts}:
        return None
    return worker.send()


def score(
    worker, spec: AdapterSpec, sequences: list[list[int]], table: RouteTable
) -> list[np.ndarray] | None:
    return worker.score(sequences, table, True)
