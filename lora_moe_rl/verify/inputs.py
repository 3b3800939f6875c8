"""What every layout is given: random adapters, samples, and routes to replay. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.router_replay.table import RouteTable

# Size of what the adapter adds to an output, for an input of ones: enough to change every logprob.
STRENGTH = 0.3


def random_adapter(
    spec: AdapterSpec,
    seed: int = 1,
    start: Mapping[str, np.ndarray] | None = None,
    strength: float = STRENGTH,
) -> dict[str, np.ndarray]:
    """Canonical float32 tensors with a B that is not zero, so that every factor has a gradient.

    A has columns of about unit norm, and B is as large as makes `scale * B A x` about `strength`,
    whatever the model's width, the rank and the scale. Where a part of the tensors is not trained
    (`adapter.init`), they are `start`, the adapter before training, plus such noise in the trained
    part.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for site in spec:
        a = rng.normal(0, 1 / math.sqrt(site.in_features), site.shape_A)
        b = rng.normal(0, strength / (site.scale * math.sqrt(site.rank)), site.shape_B)
        for letter, values in (("A", a), ("B", b)):
            name = f"{site.name}.{letter}"
            if site.frozen_rank:
                if start is None:
                    raise ValueError(f"{site.name} is not trained as a whole: `start` is needed")
                kept = np.array(start[name], dtype=np.float64)
                kept[trained_part(site, letter)] += values[trained_part(site, letter)]
                values = kept
            tensors[name] = values.astype(np.float32)
    return tensors


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Canonical float32 tensors of these names and shapes, large enough to change every token's
    logprobs; the same for a seed."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, dtype=np.float32)
        * np.float32(shape[-1] ** -0.5 if name.endswith("A") else 0.03)
        for name, shape in shapes.items()
    }


def trained_part(site: Site, letter: str) -> tuple:
    """The index of the trained rows of A, or columns of B, in a canonical tensor."""
    trained = slice(0, site.trained_rank)
    return (..., trained, slice(None)) if letter == "A" else (..., trained)


def random_batch(
    spec: AdapterSpec, samples: int = 11, seed: int = 0, lengths: tuple[int, int] = (6, 17)
) -> tuple[TrainBatch, RouteTable]:
    """Sequences of `lengths[0]` to `lengths[1] - 1` tokens with random, valid routes to replay."""
    rng = np.random.default_rng(seed)
    shape = spec.shape
    ids = [
        rng.integers(0, shape.vocab_size, int(n)).astype(np.int32)
        for n in rng.integers(*lengths, samples)
    ]
    prompts = np.array([int(rng.integers(1, len(i) - 1)) for i in ids])
    batch = TrainBatch.from_sequences(ids, prompts, step=1)
    batch.logprobs = [rng.normal(-5, 1, len(w)).astype(np.float32) for w in batch.weights]
    advantages = rng.normal(0, 1, samples).astype(np.float32)
    batch.advantages = [np.full(len(w), a) for a, w in zip(advantages, batch.weights)]
    fed = [len(i) - 1 for i in ids]
    keys = rng.random((sum(fed), len(shape.moe_layers), shape.num_experts))
    routes = np.argsort(keys, axis=-1)[..., : shape.top_k]
    rows = np.split(routes, np.cumsum(fed)[:-1])
    table = RouteTable.build(rows, fed, shape.moe_layers, shape.num_experts, shape.top_k)
    return batch, table


def with_teacher(batch: TrainBatch, top_k: int) -> TrainBatch:
    """With so many likeliest tokens of a teacher at each place, to which it gives half of all, more
    or less, at random. Raises ConfigError for more than there are."""
    rng, size = np.random.default_rng(6), 1 + max(int(ids.max()) for ids in batch.token_ids)
    if top_k > size:
        raise ConfigError(
            f"algorithm.teacher_top_k={top_k} are more tokens than the {size} that samples are "
            "drawn from; lower it"
        )
    ids, logprobs = [], []
    for weights in batch.weights:
        first = rng.integers(0, size, (len(weights), 1))
        ids.append(((first + np.arange(top_k) * (size // top_k)) % size).astype(np.int32))
        sizes = np.exp(rng.normal(0, 1, (len(weights), top_k + 1)))
        shares = 0.5 * sizes / sizes.sum(-1, keepdims=True)
        logprobs.append(np.log(shares[:, :top_k]).astype(np.float32))
    return replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)
