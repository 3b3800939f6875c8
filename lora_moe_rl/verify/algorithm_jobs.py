"""What the ranks compute for `verify algorithm`, and the plain reference beside them.

The reference takes all samples of the step at once, in float64, knowing neither micro-batches nor
ranks, and gives the loss and what each token's logprob is worth to it, and its entropy or its
divergence from a teacher where the loss goes by those. The trainer then only turns these worths
into a gradient of the adapters, by losses that are plain sums of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.shards import Shard
from lora_moe_rl.adapters.spec import VALUE_HEAD, AdapterSpec
from lora_moe_rl.algorithms.base import Algorithm, Known, Loss, Tokens
from lora_moe_rl.algorithms.parts.aggregation import aggregate
from lora_moe_rl.algorithms.parts.divergence import Divergence
from lora_moe_rl.algorithms.parts.reweight import draw
from lora_moe_rl.algorithms.parts.selection import StepTokens, lots_of
from lora_moe_rl.config import AlgorithmConfig, RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import unpack
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.verify.inputs import random_adapter, with_teacher
from lora_moe_rl.verify.jobs import STRENGTH

if TYPE_CHECKING:
    from torch import Tensor

OF_START = 3  # the seed of the adapter that algorithm.reference=start measures against
Found = tuple[float, list[Shard]]  # the loss, and this rank's part of the gradient


@dataclass(frozen=True)
class Inputs:
    """The same for every layout: samples, their routes, and the cases, of whose configs the section
    `algorithm` is taken."""

    batch: TrainBatch
    table: RouteTable
    cases: dict[str, RunConfig]


def batch_of(inputs: Inputs, config: RunConfig) -> TrainBatch:
    """The samples as the algorithm takes them: in pairs, for one that learns from those, with what
    a teacher finds likely, or drawn once more by their rewards, if it does so."""
    batch, settings = inputs.batch, config.algorithm
    if config.learns_from == "pairs":
        return replace(batch, groups=np.arange(len(batch.groups)) // 2)
    if (divergence := algorithms.make(config).divergence) is not None:
        batch = with_teacher(batch, divergence.top_k)
    if settings.reweight is None:
        return batch
    assert batch.rewards is not None
    draws = np.random.default_rng(5)
    copies = draw(batch.rewards, settings.reweight, settings.reweight_power, draws)
    return replace(batch, copies=copies)


def near_rollout(worker, spec: AdapterSpec, inputs: Inputs) -> list[np.ndarray] | None:
    """Logprobs as an engine might have sampled with: the trainer's, up to a factor of e off."""
    own = _score(worker, spec, inputs, adapters=True)
    if own is None:
        return None
    rng = np.random.default_rng(3)
    return [(o + rng.uniform(-1, 1, len(o))).astype(np.float32) for o in own]


def every_case(worker, spec: AdapterSpec, inputs: Inputs) -> dict[str, Found]:
    """The loss and gradient of each case as a run computes them, in this layout."""
    worker.set_adapter(random_adapter(spec, strength=STRENGTH))
    found = {}
    for name, case in inputs.cases.items():
        config = with_algorithm(worker.engine.config, case)
        _set_critic(worker, spec, config)
        algorithm = algorithms.make(config)
        if algorithm.from_start:
            worker.set_reference(random_adapter(spec, seed=OF_START, strength=STRENGTH))
        found[name] = _gradients(worker, config, algorithm, inputs)
    return found


def reference(worker, spec: AdapterSpec, inputs: Inputs) -> dict[str, Found]:
    """On one rank: the float64 loss, and the gradient that it makes."""
    own = _score(worker, spec, inputs, adapters=True)
    base = _score(worker, spec, inputs, adapters=False, replay=False)
    start = _score(worker, spec, inputs, adapters=True, replay=False, seed=OF_START)
    assert own is not None, "one rank answers for itself"
    assert base is not None and start is not None
    worker.set_adapter(random_adapter(spec, strength=STRENGTH))
    entropies = _entropies(worker, inputs)
    found = {}
    for name, case in inputs.cases.items():
        config = with_algorithm(worker.engine.config, case)
        batch = batch_of(inputs, config)
        values = _values(worker, spec, config, inputs)
        algorithm = algorithms.make(config)
        against = start if algorithm.from_start else base
        loss, worths = plain(config, batch, own, against, values, entropies)
        config, one = with_algorithm(config, RunConfig()), Inputs(batch, inputs.table, {})
        product, shards = _product(worker, config, one, worths.logprobs, worths.entropies)
        # `plain` knows no entropies: what they add is what the product is more than the logprobs'.
        if any(worth.any() for worth in worths.entropies):
            loss += product - sum(float(w @ o) for w, o in zip(worths.logprobs, own, strict=True))
        if algorithm.divergence is not None:  # nor divergences
            apart = LinearDivergence(config.algorithm, 1, algorithm.divergence)
            product, more = _product(worker, config, one, worths.divergences, None, apart)
            loss, shards = loss + product, _added(shards, more)
        found[name] = loss, shards
    return found


def _product(
    worker,
    config: RunConfig,
    inputs: Inputs,
    worths: Sequence[np.ndarray],
    of_entropy: Sequence[np.ndarray] | None = None,
    linear: Algorithm | None = None,
) -> Found:
    """The sum of products of tokens' worths, by `linear` (None: of logprobs and entropies), and its
    gradient."""
    count = sum(len(worth) for worth in worths)
    others = [0 * worth for worth in worths] if of_entropy is None else of_entropy
    batch = replace(
        inputs.batch,
        advantages=[(worth * count).astype(np.float32) for worth in worths],
        logprobs=[(worth * count).astype(np.float32) for worth in others],
        weights=[np.ones(len(worth), np.float32) for worth in worths],
        copies=np.ones(len(worths), np.int64),
    )
    linear = linear or Linear(config.algorithm, 1)
    return _gradients(worker, config, linear, Inputs(batch, inputs.table, {}))


def _added(shards: Sequence[Shard], others: Sequence[Shard]) -> list[Shard]:
    """The sum of two gradients of one rank."""
    pairs = zip(shards, others, strict=True)
    return [replace(one, data=one.data + other.data) for one, other in pairs]


class Worths(NamedTuple):
    """What the logprob, the entropy and the divergence of each token are worth to the loss, float64
    `[R]` of each sample."""

    logprobs: list[np.ndarray]
    entropies: list[np.ndarray]
    divergences: list[np.ndarray]


def plain(
    config: RunConfig,
    batch: TrainBatch,
    own: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    values: Sequence[np.ndarray] | None = None,
    entropies: Sequence[np.ndarray] | None = None,
) -> tuple[float, Worths]:
    """The loss of the step, were all entropies and divergences 0, and what those of each token are
    worth to it. own, reference: logprobs [R] of the responses, of the policy
    and of what it is measured against. values: [R], of a critic. entropies: [R], by which tokens
    may be selected. A sample that stands in the loss several times is there so often."""
    import torch

    algorithm = algorithms.make(config)
    standing = np.repeat(np.arange(len(batch.copies)), batch.copies).tolist()
    lengths = [len(weights) for weights in batch.weights]
    sizes = [lengths[i] for i in standing]
    sample_of = np.repeat(np.arange(len(sizes)), sizes)
    weights = np.concatenate([batch.weights[i] for i in standing])
    mask = weights > 0
    advantages, step_mean = _revised(algorithm, batch, own, reference, values), None
    selected: Tensor | None = None
    leaf = torch.from_numpy(np.concatenate(own).astype(np.float64)).requires_grad_()
    logprobs = torch.cat([leaf.split(lengths)[i] for i in standing])
    zeros = [torch.zeros_like(leaf).requires_grad_() for _ in range(2)]
    entropy, divergence = (torch.cat([one.split(lengths)[i] for i in standing]) for one in zeros)
    rewards: list[np.ndarray] = []
    if batch.rewards is not None:
        rewards = [np.repeat(*one) for one in zip(batch.rewards, lengths, strict=True)]

    def tokens() -> Tokens:
        stays = torch.from_numpy(mask)

        def inside(values: Sequence[np.ndarray]) -> torch.Tensor:
            every = np.concatenate([values[i] for i in standing]).astype(np.float64)
            return torch.from_numpy(every).where(stays, 0)

        return Tokens(
            mask=stays,
            logprobs=logprobs.where(stays, 0),
            old=logprobs.detach().where(stays, 0),
            rollout=inside(batch.logprobs),
            reference=inside(reference) if "reference" in algorithms.passes(config) else None,
            advantages=inside(advantages),
            versions=inside(batch.versions).int(),
            samples=torch.from_numpy(sample_of),
            num_samples=len(sizes) + 1,
            step_mean=step_mean,
            rewards=inside(rewards) if algorithm.revises else None,
            entropy=entropy.where(stays, 0) if algorithm.trains_entropy else None,
            selected=selected,
            divergence=None if algorithm.divergence is None else divergence.where(stays, 0),
        )

    for kept_alone in (False, True):
        if algorithm.averages and algorithm.averages_kept == kept_alone:
            total, count = (
                each.where(torch.from_numpy(mask), 0) for each in algorithm.averaged(tokens())
            )
            step_mean = (total.sum() / count.sum()).item()
        if algorithm.rejects and not kept_alone:
            mask = mask & algorithm.keep(tokens()).numpy()
    if algorithm.selects:
        selected = _selected(config, algorithm, batch, tokens(), entropies)
    losses = algorithm.loss(tokens()).values.where(torch.from_numpy(mask), 0)
    kept = np.bincount(sample_of[mask], minlength=len(sizes))
    longest = config.max_response_tokens
    once, groups = np.ones(len(sizes), np.int64), batch.groups[standing]
    scales = aggregate(config.algorithm.aggregation, kept, groups, once, longest)
    factor = weights * scales.of_sample.astype(np.float64)[sample_of]
    loss = (losses * torch.from_numpy(factor)).sum() / max(scales.divisor, 1)
    worths = torch.autograd.grad(loss, (leaf, *zeros), materialize_grads=True)
    each = (np.split(one.numpy(), np.cumsum(lengths)[:-1]) for one in worths)
    return loss.item(), Worths(*each)


def _revised(
    algorithm: Algorithm,
    batch: TrainBatch,
    own: Sequence[np.ndarray],
    base: Sequence[np.ndarray],
    values: Sequence[np.ndarray] | None,
) -> Sequence[np.ndarray]:
    """Advantages [R] of each sample, made again where the algorithm does so."""
    if not algorithm.revises:
        return batch.advantages
    assert batch.rewards is not None
    old, reference = ([one.astype(np.float64) for one in each] for each in (own, base))
    known = Known(batch.rewards, batch.groups, batch.masks, old, reference, values)
    return algorithm.revised(known)


def _selected(
    config: RunConfig,
    algorithm: Algorithm,
    batch: TrainBatch,
    tokens: Tokens,
    entropies: Sequence[np.ndarray] | None,
) -> Tensor:
    """1.0 for tokens that are selected, else 0.0: [T] of all samples in turn, as often as each
    stands in the loss."""
    mask, sizes = tokens.mask, [len(weights) for weights in batch.weights]
    numbers = enumerate(zip(batch.copies, sizes, strict=True))
    lots = [lots_of(config.seed, batch.step, i, *one).ravel() for i, one in numbers]
    entropy = None
    if algorithm.selects_by_entropy:
        assert entropies is not None
        every = [np.tile(*one) for one in zip(entropies, batch.copies, strict=True)]
        entropy = np.concatenate(every)[mask.numpy()]
    streams = (tokens.old, tokens.old, tokens.rollout, tokens.advantages)
    inside = [one[mask].numpy() for one in streams]
    step = StepTokens(*inside, np.concatenate(lots)[mask.numpy()], entropy)
    found = tokens.logprobs.new_zeros(len(mask))
    found[mask] = found.new_tensor(algorithm.select(step).tokens)
    return found


class Linear(Algorithm):
    """The sum of advantage times logprob, and of the engine's logprob times entropy: its gradient
    is that of any loss whose worths these are."""

    trains_entropy = True

    def loss(self, tokens: Tokens) -> Loss:
        assert tokens.entropy is not None
        return Loss(tokens.advantages * tokens.logprobs + tokens.rollout * tokens.entropy)


class LinearDivergence(Algorithm):
    """The sum of advantage times divergence."""

    def __init__(self, settings: AlgorithmConfig, max_response_tokens: int, divergence: Divergence):
        super().__init__(settings, max_response_tokens)
        self._divergence = divergence

    @property
    def divergence(self) -> Divergence:
        return self._divergence

    def loss(self, tokens: Tokens) -> Loss:
        assert tokens.divergence is not None
        return Loss(tokens.advantages * tokens.divergence)


def with_algorithm(config: RunConfig, case: RunConfig) -> RunConfig:
    """`config` with the algorithm of a case, in a run as long as the case's."""
    trainer = config.trainer.model_copy(update={"steps": case.trainer.steps})
    return config.model_copy(update={"algorithm": case.algorithm, "trainer": trainer})


def _set_critic(worker, spec: AdapterSpec, config: RunConfig) -> None:
    """Gives the engine the critic that the algorithm wants, with random adapters, or takes it away.
    The model is wrapped once."""
    engine, settings = worker.engine, algorithms.make(config).critic
    engine.critic = None
    if settings is None:
        return
    if not hasattr(worker, "critic"):
        from lora_moe_rl.trainer.critic import Critic

        worker.critic = Critic(engine, settings)
    engine.critic = worker.critic
    engine.critic.settings = settings
    head = np.random.default_rng(4).normal(0, 0.1, (1, spec.shape.hidden_size))
    tensors = random_adapter(spec, seed=2, strength=STRENGTH)
    engine.critic.adapters.load(tensors | {VALUE_HEAD: head.astype(np.float32)})


def _values(worker, spec: AdapterSpec, config: RunConfig, inputs: Inputs):
    """The critic's values, float64 [R] of each sample, if there is one."""
    _set_critic(worker, spec, config)
    if worker.engine.critic is None:
        return None
    worker.engine.config, worker.engine.algorithm = config, algorithms.make(config)
    _, values, _ = worker.critic_gradients(inputs.batch, inputs.table)
    worker.engine.critic = None
    return values


def _gradients(worker, config: RunConfig, algorithm: Algorithm, inputs: Inputs) -> Found:
    worker.engine.config, worker.engine.algorithm = config, algorithm
    loss, _, shards = worker.gradients(batch_of(inputs, config), inputs.table)
    return loss, shards


def _entropies(worker, inputs: Inputs) -> list[np.ndarray]:
    """The entropy of what each response token is sampled from, by the adapter that is set, in nats,
    [R] of each sample, with the routes that are replayed. On one rank."""
    engine, batch, found = worker.engine, inputs.batch, {}
    routes = engine.routes(batch, (inputs.table,))
    with engine.watched_replay(batch, routes):
        works = engine.my_work(batch, np.arange(len(batch)), routes, 1, 0)
        temperature = engine.config.rollout.temperature
        engine.forward(works, "own", temperature, entropy=True)
    for work in works:
        found |= unpack(work.data, work.known["entropy"].cpu().numpy())
    return [found[i] for i in range(len(batch))]


def _score(
    worker, spec: AdapterSpec, inputs: Inputs, adapters: bool, replay: bool = True, seed: int = 1
) -> list[np.ndarray] | None:
    """Logprobs [R] of the responses, with the routes that are replayed, or of routers that
    choose."""
    worker.set_adapter(random_adapter(spec, seed=seed, strength=STRENGTH))
    sequences = [ids.tolist() for ids in inputs.batch.token_ids]
    found = worker.score(sequences, inputs.table if replay else None, adapters)
    if found is None:
        return None
    return [o[-len(w) :] for o, w in zip(found, inputs.batch.weights, strict=True)]
