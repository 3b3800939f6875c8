"""Tables that a trainer would not choose by itself, and tables that are slightly wrong. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lora_moe_rl.router_replay.table import RouteTable

SHIFTS = ("token", "layer", "expert")


def shifts_of(table: RouteTable) -> tuple[str, ...]:
    """In which ways it can be wrong by one: the routes of one layer are those of no other."""
    return tuple(by for by in SHIFTS if by != "layer" or len(table.layers) > 1)


def permuted(table: RouteTable, seed: int) -> RouteTable:
    """Every layer's experts renamed, by a permutation of its own that keeps none."""
    rng = np.random.default_rng(seed)
    ids = table.ids.copy()
    for column in range(len(table.layers)):
        order = rng.permutation(table.num_experts)
        other = np.empty(table.num_experts, dtype=ids.dtype)
        other[order] = np.roll(order, 1)
        ids[:, column] = other[table.ids[:, column]]
    return replace(table, ids=ids)


def moved(table: RouteTable, other: RouteTable) -> float:
    """Share of the valid routes of `table` that `other` does not have."""
    same = (table.ids[..., :, None] == other.ids[..., None, :]).any(-1)
    return float((~same[table.valid]).mean())


def shifted(table: RouteTable, by: str) -> RouteTable:
    """Wrong by one token, by one layer, or in one id of one token in one layer."""
    ids = table.ids.copy()
    if by == "token":
        for start, stop in zip(table.offsets[:-1], table.offsets[1:], strict=True):
            ids[start:stop] = np.roll(ids[start:stop], 1, axis=0)
    elif by == "layer":
        ids = np.roll(ids, 1, axis=1)
    elif by == "expert":
        # In the middle of the first sample, so that tokens that are scored come after it.
        row, column = int(table.offsets[1]) // 2, len(table.layers) // 2
        unused = np.setdiff1d(np.arange(table.num_experts), ids[row, column])
        ids[row, column, 0] = unused[0]
    else:
        raise ValueError(f"{by} is none of {', '.join(SHIFTS)}")
    return replace(table, ids=ids)


def rows_of(table: RouteTable) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(ids, valid) of each sample."""
    cuts = table.offsets[1:-1]
    return np.split(table.ids, cuts), np.split(table.valid, cuts)
