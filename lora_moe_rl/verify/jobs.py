"""What a rank computes for `verify layout`, and the whole of what its ranks computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lora_moe_rl.adapters import sharding
from lora_moe_rl.adapters.shards import Shard, assemble
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.files.trainer_state import MOMENTS
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.verify.inputs import random_adapter

STEPS = 3
# Gradients are compared: a larger adapter makes the attention of a trained model so sharp that the
# order of the float32 sums alone moves the query's gradient by 1e-5 of its size.
STRENGTH = 0.1
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Inputs:
    """The same for every layout. `adapter` is None for the first run of all, which makes it.

    `directory` is where the checkpoint goes; `other` that of one rank, to be loaded, with what its
    manifest would hold. `dropped`: entries of the sharding table to leave out.
    """

    batch: TrainBatch
    table: RouteTable
    directory: Path
    adapter: Tensors | None = None
    other: tuple[Path, dict] | None = None
    dropped: tuple[tuple, ...] = ()

    @property
    def sequences(self) -> list[list[int]]:
        return [ids.tolist() for ids in self.batch.token_ids]


@dataclass
class Part:
    """What one rank computed: shards by name of the quantity, and figures all ranks know."""

    shards: dict[str, list[Shard]] = field(default_factory=dict)
    adapter: Tensors | None = None
    loss: float = 0.0
    grad_norm: float = 0.0
    logprobs: list[np.ndarray] | None = None
    own_logprobs: list[np.ndarray] | None = None
    meta: dict | None = None
    failure: Exception | None = None


def compute(worker, spec: AdapterSpec, inputs: Inputs) -> Part:
    """Scores, gradients, three optimizer steps and checkpoints, on one rank.

    A rank that fails in training returns what it has until then; its end makes those that wait for
    it fail too.
    """
    gradients = worker.engine.adapters.gradients
    gradients.layout = replace(gradients.layout, table=sharding.without(inputs.dropped))
    part = Part()
    part.shards["initial"] = worker.export()
    part.adapter = inputs.adapter
    if part.adapter is None:
        start = assemble(spec.tensor_shapes, part.shards["initial"])
        part.adapter = random_adapter(spec, start=start, strength=STRENGTH)
        worker.set_adapter(part.adapter)
        part.own_logprobs = worker.score(inputs.sequences, None, True)
    else:
        worker.set_adapter(part.adapter)
    part.logprobs = worker.score(inputs.sequences, inputs.table, True)
    found = worker.gradients(inputs.batch, inputs.table)
    part.loss, part.grad_norm, part.shards["gradients"] = found
    try:
        _train(worker, inputs, part)
    except Exception as error:
        part.failure = error if isinstance(error, LoraMoeRlError) else RuntimeError(repr(error))
    return part


def _train(worker, inputs: Inputs, part: Part) -> None:
    for _ in range(STEPS):
        worker.update(inputs.batch, inputs.table)
    part.meta = worker.save(inputs.directory).meta
    part.shards |= _state(worker, "trained")
    if inputs.other is not None:
        worker.load(*inputs.other)
        part.shards |= _state(worker, "loaded")


def _state(worker, name: str) -> dict[str, list[Shard]]:
    """The adapter and Adam's moments, as in a checkpoint."""
    engine = worker.engine
    moments = {f"{name} {m}": engine.adapters.export(engine.optimizer.state(m)) for m in MOMENTS}
    return {name: worker.export()} | moments


def load_all(worker, spec: AdapterSpec, checkpoints: Sequence[tuple[Path, dict]]) -> list[Part]:
    """One rank reads the checkpoints of other layouts, one after the other."""
    parts = []
    for directory, meta in checkpoints:
        worker.load(directory, meta)
        parts.append(Part(shards=_state(worker, "loaded")))
    return parts


def hugging_face(
    rank: int,
    model_dir: Path,
    spec: AdapterSpec,
    tensors: Tensors,
    sequences: Sequence[Sequence[int]],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Hugging Face's logprobs of whole sequences, under hand-merged weights and of the base; a
    process's job."""
    from lora_moe_rl.verify import hf

    model = hf.load(model_dir)
    base = [hf.logprobs(model, sequence) for sequence in sequences]
    hf.merge(model, spec, tensors)
    return [hf.logprobs(model, sequence) for sequence in sequences], base


@dataclass
class Outcome:
    """The parts of all ranks, whole. `tensors[quantity]` are canonical tensors; a quantity that the
    ranks did not come to is not there."""

    tensors: dict[str, Tensors]
    loss: float
    grad_norm: float
    logprobs: list[np.ndarray] | None
    own_logprobs: list[np.ndarray] | None = None
    adapter: Tensors | None = None
    meta: dict | None = None
    failure: Exception | None = None


def gather(spec: AdapterSpec, parts: Sequence[Part]) -> Outcome:
    """Raises AdapterError when the ranks' slices do not make whole tensors."""
    failures = [part.failure for part in parts if part.failure is not None]
    names = set.intersection(*(set(part.shards) for part in parts))
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    own = [part.own_logprobs for part in parts if part.own_logprobs is not None]
    return Outcome(
        tensors={name: whole(spec, name, [p.shards[name] for p in parts]) for name in names},
        loss=parts[0].loss,
        grad_norm=parts[0].grad_norm,
        logprobs=logprobs[0] if logprobs else None,
        own_logprobs=own[0] if own else None,
        adapter=parts[0].adapter,
        meta=parts[0].meta,
        # What one rank says on purpose says more than that another lost it.
        failure=min(failures, key=lambda e: not isinstance(e, LoraMoeRlError), default=None),
    )


def whole(spec: AdapterSpec, quantity: str, shards: Sequence[Sequence[Shard]]) -> Tensors:
    shapes = spec.tensor_shapes if quantity in ("initial", "trained", "loaded") else trained(spec)
    return assemble(shapes, [shard for some in shards for shard in some])


def trained(spec: AdapterSpec) -> Mapping[str, tuple[int, ...]]:
    """Shapes of what gradients and moments exist of: the canonical tensors without the rows of A
    and columns of B that are not trained."""
    shapes = {}
    for site in spec:
        a, b = site.shape_A, site.shape_B
        shapes[f"{site.name}.A"] = (*a[:-2], site.trained_rank, a[-1])
        shapes[f"{site.name}.B"] = (*b[:-1], site.trained_rank)
    return shapes
