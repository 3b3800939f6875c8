"""Parts of routes that are a few numbers until a rank fetches them (`router_replay/travel.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.table import UNKNOWN, RouteTable


@dataclass(frozen=True)
class Head:
    """A part of which only the first rows count; it is of one record. `of`, `first`: the sums of
    the tokens of all its rows and of these."""

    part: Any
    num_rows: int
    of: int = UNKNOWN
    first: int = UNKNOWN

    def made(self, fetched: np.ndarray) -> np.ndarray:
        whole = PackedRoutes.from_bytes(fetched)
        return whole.head(self.num_rows, self.of, self.first).to_bytes()


@dataclass(frozen=True)
class Absent:
    """A part of one record without any route."""

    layers: tuple[int, ...]
    top_k: int
    num_experts: int
    num_rows: int

    def made(self) -> np.ndarray:
        nothing = [None], [self.num_rows], self.layers, self.num_experts, self.top_k
        return PackedRoutes.pack(RouteTable.build(*nothing)).to_bytes()
