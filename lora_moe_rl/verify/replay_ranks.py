"""What a trainer rank does for `verify replay`: it replays tables, and notes which experts its
token dispatchers were given, apart from all that installs routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.table import RouteTable

SHOWN = 3
NOTICED = "was not routed as recorded"  # of the audit's message


@dataclass(frozen=True)
class Replayed:
    """One forward of all sequences: `table` is installed, `truth` is what it should have been."""

    name: str
    sequences: list[list[int]]
    table: RouteTable
    truth: RouteTable
    adapter: bool = False
    train: bool = False  # with backward, as a training step


@dataclass
class Used:
    """What one rank's dispatchers were given in one forward.

    `routes`: of tokens with a valid row, top_k of each; `wrong` of those were not the table's.
    `seen` bool `[rows, moe_layers]`: whose routes passed here. `calls`: forwards of all routers.
    `audit`: the difference that the run's own audit found, in a table that is not the truth.
    """

    routes: int
    wrong: int
    first: list[str]
    seen: np.ndarray
    calls: int
    micro_batches: int
    logprobs: list[np.ndarray] | None = None
    audit: str | None = None


@dataclass
class _Calls:
    """Maps bool `[T, E]` given to one layer's dispatcher, in order; those of a recomputing forward
    apart, which runs with gradients after a first without."""

    first: list[np.ndarray] = field(default_factory=list)
    again: list[np.ndarray] = field(default_factory=list)


def replay(
    worker, spec, tensors: dict[str, np.ndarray], tasks: Sequence[Replayed], recompute: bool
) -> list[Used]:
    """The job of a rank: every task in turn."""
    worker.set_adapter(tensors)
    return [_one(worker, task, recompute) for task in tasks]


def _one(worker, task: Replayed, recompute: bool) -> Used:
    engine = worker.engine
    logprobs = None
    with watched(engine, recompute and task.train) as calls:
        batch = TrainBatch.from_sequences(task.sequences)
        if task.train:
            batch.advantages = [one + 1 for one in batch.advantages]
            worker.gradients(batch, task.table)
        else:
            logprobs = _score(engine, batch, task)
    used = compare(tokens(worker, task), calls, task, recompute and task.train)
    used.logprobs = logprobs
    if task.table is not task.truth:
        used.audit = _audited(engine, batch, task)
    return used


def _audited(engine, batch: TrainBatch, task: Replayed) -> str | None:
    """What the run's own audit says of these routes against the truth."""
    engine.audit.against, batch.step = task.truth, 1
    try:
        _score(engine, batch, task)
    except ReplayError as error:
        if NOTICED not in str(error):
            raise
        return str(error)
    finally:
        engine.audit.against = None
    return None


def _score(engine, batch: TrainBatch, task: Replayed) -> list[np.ndarray] | None:
    if task.adapter:
        return engine.score(batch, task.table)
    with engine.adapters.off():
        return engine.score(batch, task.table)


@contextmanager
def watched(engine, recompute: bool) -> Iterator[dict[int, _Calls]]:
    """{layer: calls} of the dispatchers of this rank's MoE layers."""
    calls: dict[int, _Calls] = {}
    undo = []
    for chunk in engine.chunks:
        for layer in getattr(chunk, "module", chunk).decoder.layers:
            dispatcher = getattr(layer.mlp, "token_dispatcher", None)
            if dispatcher is not None:
                mine = calls[layer.layer_number - 1] = _Calls()
                undo.append((dispatcher, dispatcher.dispatch_preprocess))
                dispatcher.dispatch_preprocess = _noting(dispatcher, mine, recompute)
    try:
        yield calls
    finally:
        for dispatcher, stock in undo:
            dispatcher.dispatch_preprocess = stock


def _noting(dispatcher: Any, calls: _Calls, recompute: bool):
    upstream = dispatcher.dispatch_preprocess

    def dispatch_preprocess(hidden_states, routing_map, probs):
        out = upstream(hidden_states, routing_map, probs)
        again = recompute and torch.is_grad_enabled()
        # What it holds now is what it permutes tokens by.
        (calls.again if again else calls.first).append(dispatcher.routing_map.cpu().numpy().copy())
        return out

    return dispatch_preprocess


def tokens(worker, task: Replayed) -> list[np.ndarray]:
    """Rows of the table of this rank's tokens, of each micro-batch; -1 for padding."""
    from megatron.core import parallel_state as ps

    engine = worker.engine
    batch = TrainBatch.from_sequences(task.sequences)
    size, rank = 1, 0
    if task.train:
        size, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
    works = engine.my_work(batch, range(len(batch)), None, size, rank)
    cuts = ps.get_context_parallel_world_size(), ps.get_tensor_model_parallel_world_size()
    # Context parallelism cuts the tokens in order, and sequence parallelism each of the slices.
    mine = ps.get_context_parallel_rank(), ps.get_tensor_model_parallel_rank()
    return [work.data.rows[work.data.fed].reshape(*cuts, -1)[mine] for work in works]


def compare(
    micro_batches: Sequence[np.ndarray], calls: dict[int, _Calls], task: Replayed, recompute: bool
) -> Used:
    """What the dispatchers were given, against `task.truth`; `micro_batches` as of `tokens`.

    Raises RuntimeError when a router ran another number of times than there are micro-batches.
    """
    truth = task.truth
    used = Used(0, 0, [], np.zeros(truth.valid.shape, bool), 0, len(micro_batches))
    columns = {layer: column for column, layer in enumerate(truth.layers)}
    for layer, noted in calls.items():
        for maps in (noted.first, noted.again) if recompute else (noted.first,):
            if len(maps) != len(micro_batches):
                raise RuntimeError(
                    f"layer {layer}: its dispatcher ran {len(maps)} times for {len(micro_batches)} "
                    f"micro-batches"
                )
            used.calls += len(maps)
            for rows, chosen in zip(micro_batches, maps, strict=True):
                _compare_one(used, layer, columns[layer], rows, chosen, truth)
        if noted.again and not recompute:
            raise RuntimeError(f"layer {layer}: recomputed without being asked to")
    return used


def _compare_one(used: Used, layer: int, column: int, rows, chosen, truth: RouteTable) -> None:
    at = np.flatnonzero(rows >= 0)
    at = at[truth.valid[rows[at], column]]
    expected = np.zeros((len(at), truth.num_experts), bool)
    np.put_along_axis(expected, truth.ids[rows[at], column].astype(np.int64), True, axis=1)
    wrong = (expected & ~chosen[at]).sum(axis=1)
    wrong = np.maximum(wrong, (chosen[at] & ~expected).sum(axis=1))
    used.routes += int(expected.sum())
    used.wrong += int(wrong.sum())
    used.seen[rows[at], column] = True
    for i in np.flatnonzero(wrong):
        if len(used.first) == SHOWN:
            break
        row = int(rows[at[i]])
        sample = int(np.searchsorted(truth.offsets, row, side="right")) - 1
        used.first.append(
            f"sample {sample}, token {row - int(truth.offsets[sample])}, layer {layer}: expected "
            f"{np.flatnonzero(expected[i]).tolist()}, used {np.flatnonzero(chosen[at[i]]).tolist()}"
        )
