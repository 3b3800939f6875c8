"""The canonical adapter as data: which linears of a model are adapted, with what shapes and ranks.

Computed from a Hugging Face `config.json` alone, without torch. A site is one adapted linear of one
global layer. Its tensors are

    A [r, in]      B [out, r]          a dense site
    A [E, r, in]   B [E, out, r]       a routed-experts site, keyed by global expert id

unscaled; the function is `y += scale * B A x`. Gate and up are separate sites, and so are q, k and
v, whatever an engine fuses. Everything foreign (Megatron shards, vLLM slots, PEFT files) is a pure
map from and to this form.

Two forms differ from the plain one. With `expert_layout=shared_outer` all experts of a layer share
the tensor on the hidden side (A of gate and up, B of down), which then has no E. Where A and B
begin at the base (`base_start.py`) the function is `y += scale * (B A - B0 A0) x`, where A0 and B0
are the start and never change: the canonical A is [A; A0], B is [B, -B0], so that it is right with
respect to the base as it is, and its rank is twice the trained one. So it stands in a checkpoint;
what is computed with, served and exported are the differences (`served.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from lora_moe_rl.adapters.families import Dims, ModelShape
from lora_moe_rl.adapters.patterns import Values
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rollout.facts import NOT_SERVABLE

VALUE_HEAD = "value_head.weight"  # of a critic: [1, hidden], in the place of the head


@dataclass(frozen=True)
class Site:
    """One adapted linear of one global layer.

    `rank` is the whole rank, as served and exported. `shared` names the tensor that all experts of
    a routed site share. The last `frozen_rank` rows of A and columns of B are not trained.
    `blocks`: of a linear that has several outputs side by side, the rows of B that are of each.
    """

    layer: int
    module: str
    in_features: int
    out_features: int
    rank: int
    scale: float
    num_experts: int | None = None
    shared: Literal["A", "B"] | None = None
    frozen_rank: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.module}"

    @property
    def trained_rank(self) -> int:
        return self.rank - self.frozen_rank

    @property
    def shape_A(self) -> tuple[int, ...]:
        return self._shape("A", (self.rank, self.in_features))

    @property
    def shape_B(self) -> tuple[int, ...]:
        return self._shape("B", (self.out_features, self.rank))

    def _shape(self, matrix: str, one: tuple[int, int]) -> tuple[int, ...]:
        if self.num_experts is None or self.shared == matrix:
            return one
        return (self.num_experts, *one)


@dataclass(frozen=True)
class AdapterSpec:
    """All sites of one adapter, in layer order."""

    shape: ModelShape
    sites: tuple[Site, ...]

    @classmethod
    def build(cls, shape: ModelShape, config: AdapterConfig, servable: bool = True) -> AdapterSpec:
        """The adapter of a model; `servable`: only what vLLM can serve as an adapter.

        Raises ConfigError for a target or a pattern that the model lacks, a target or a model that
        vLLM cannot serve, a rank that does not fit, and an option that has no effect.
        """
        available = [shape.modules(layer) for layer in range(shape.num_layers)]
        names = list({name: None for modules in available for name in modules})
        _check_targets(config.targets, names, shape.architecture, servable)
        if servable and shape.family.not_served:
            raise ConfigError(
                f"vLLM cannot serve adapters of {shape.architecture}: {shape.family.not_served}"
            )
        ranks = Values("adapter.rank_pattern", config.rank_pattern)
        alphas = Values("adapter.alpha_pattern", config.alpha_pattern)
        sites = tuple(
            _site(_Place(layer, name), dims, shape, config, ranks, alphas)
            for layer, modules in enumerate(available)
            for name, dims in modules.items()
            if any(_selects(target, name) for target in config.targets)
        )
        ranks.require_used(sites)
        alphas.require_used(sites)
        _check_expert_options(config, sites)
        return cls(shape, sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    @property
    def has_experts(self) -> bool:
        """Whether one of its sites is of routed experts."""
        return any(site.num_experts is not None for site in self.sites)

    @cached_property
    def by_name(self) -> dict[str, Site]:
        return {site.name: site for site in self.sites}

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """`{"layers.0.q_proj.A": shape, "layers.0.q_proj.B": shape, ...}`, in order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for site in self.sites:
            shapes[f"{site.name}.A"] = site.shape_A
            shapes[f"{site.name}.B"] = site.shape_B
        return shapes

    def of_critic(self) -> AdapterSpec:
        """The spec of the critic beside this adapter: the same modules and ranks, all of which is
        trained."""
        sites = (replace(site, rank=site.trained_rank, frozen_rank=0) for site in self.sites)
        return AdapterSpec(self.shape, tuple(sites))

    def lr_factors(self, pattern: Mapping[str, float]) -> dict[str, float]:
        """The learning-rate factor of every site, by `trainer.lr_pattern`. Raises ConfigError for a
        key that is no pattern, or matches no site, and for factors of 0 alone."""
        values = Values("trainer.lr_pattern", pattern)
        values.require_used(self.sites)
        factors = {site.name: values.of(site, 1.0) for site in self.sites}
        if not any(factors.values()):
            raise ConfigError(
                f"trainer.lr_pattern={dict(pattern)} is 0 for every adapter: nothing would be "
                "trained; leave out a pattern, or give one of them a factor above 0"
            )
        return factors

    @property
    def num_parameters(self) -> int:
        """Numbers of the canonical tensors, those that are not trained included."""
        return sum(math.prod(shape) for shape in self.tensor_shapes.values())


@dataclass(frozen=True)
class _Place:
    layer: int
    module: str


def _site(
    place: _Place,
    dims: Dims,
    shape: ModelShape,
    config: AdapterConfig,
    ranks: Values[int],
    alphas: Values[float],
) -> Site:
    in_features, out_features, experts = dims
    rank, alpha = config.rank, config.alpha
    if experts is not None:
        rank = _over_top_k(config, shape.top_k) if config.expert_rank_over_top_k else rank
        rank = config.expert_rank or rank
        alpha = config.expert_alpha or alpha
    rank, alpha = ranks.of(place, rank), alphas.of(place, alpha)
    scale = alpha / (math.sqrt(rank) if config.rslora else rank)
    shared: Literal["A", "B"] | None = None
    if experts is not None and config.expert_layout == "shared_outer":
        shared = "B" if place.module == "experts.down" else "A"
    frozen = rank if config.starts_from_base else 0
    site = Site(
        place.layer, place.module, in_features, out_features, rank + frozen, scale, experts,
        shared, frozen, shape.blocks(place.module),
    )  # fmt: skip
    if frozen and rank > min(in_features, out_features):
        raise ConfigError(
            f"adapter.init={config.init} takes rank {rank} of {site.name}, which is {out_features} "
            f"by {in_features}; give it a rank up to {min(in_features, out_features)} "
            f"(adapter.rank_pattern)"
        )
    return site


def _over_top_k(config: AdapterConfig, top_k: int) -> int:
    if config.rank < top_k:
        raise ConfigError(
            f"adapter.expert_rank_over_top_k divides adapter.rank={config.rank} by the model's "
            f"{top_k} experts a token, which leaves no rank; set adapter.rank to {top_k} or more"
        )
    return config.rank // top_k


def _selects(target: str, name: str) -> bool:
    return target == name if name in NOT_SERVABLE else fnmatchcase(name, target)


def _check_targets(
    targets: tuple[str, ...], names: list[str], architecture: str, servable: bool
) -> None:
    offered = [name for name in names if not (servable and name in NOT_SERVABLE)]
    for target in targets:
        if servable and target in NOT_SERVABLE and target in names:
            raise ConfigError(
                f"adapter.targets names {target}: {NOT_SERVABLE[target]}; leave it out or set that"
            )
        if not any(_selects(target, name) for name in offered):
            raise ConfigError(
                f"adapter.targets: {architecture} has no module that matches {target!r}; it has "
                f"{', '.join(offered)}"
            )


def _check_expert_options(config: AdapterConfig, sites: Sequence[Site]) -> None:
    if any(site.num_experts is not None for site in sites):
        return
    for key in ("expert_rank", "expert_alpha", "expert_rank_over_top_k", "expert_layout"):
        value = getattr(config, key)
        if value != type(config).model_fields[key].default:
            raise ConfigError(
                f"adapter.{key}={value} has no effect: adapter.targets={','.join(config.targets)} "
                f"adapts no routed experts"
            )
