"""The canonical adapter as data: which linears of a model are adapted, with what shapes and ranks.

Computed from a Hugging Face `config.json` alone, without torch. A site is one adapted linear of one
global layer. Its tensors are

    A [r, in]      B [out, r]          a dense site
    A [E, r, in]   B [E, out, r]       a routed-experts site, keyed by global expert id

unscaled; the function is `y += scale * B A x`. Gate and up are separate sites, and so are q, k and
v, whatever an engine fuses. Everything foreign (Megatron shards, vLLM slots, PEFT files) is a pure
map from and to this form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import ConfigError, ModelError

# The architectures that trainer, adapters and engine all know.
SUPPORTED = {
    "Qwen3MoeForCausalLM": "Qwen3-MoE (GQA, qk-norm, softmax router)",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, Moonlight, Kimi-K2 (MLA, sigmoid router, shared expert)",
}

# vLLM absorbs kv_b_proj into its attention and silently ignores an adapter on it.
NOT_SERVABLE = {"kv_b_proj": "vLLM absorbs it into MLA attention and would ignore the adapter"}


@dataclass(frozen=True)
class Site:
    """One adapted linear of one global layer."""

    layer: int
    module: str
    in_features: int
    out_features: int
    rank: int
    scale: float
    num_experts: int | None = None

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.module}"

    @property
    def shape_A(self) -> tuple[int, ...]:
        shape = (self.rank, self.in_features)
        return shape if self.num_experts is None else (self.num_experts, *shape)

    @property
    def shape_B(self) -> tuple[int, ...]:
        shape = (self.out_features, self.rank)
        return shape if self.num_experts is None else (self.num_experts, *shape)


@dataclass(frozen=True)
class ModelShape:
    """What the rest of the system needs to know of a model's `config.json`."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]  # global layer numbers, from 0
    dims: Mapping[str, int]

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Raises ModelError for an architecture that is not supported."""
        names = config.get("architectures") or [None]
        if names[0] == "Qwen3MoeForCausalLM":
            return _qwen3_moe(config)
        if names[0] == "DeepseekV3ForCausalLM":
            return _deepseek_v3(config)
        listing = "; ".join(f"{name}: {what}" for name, what in SUPPORTED.items())
        raise ModelError(f"architecture {names[0]} is not supported; supported are {listing}")

    def modules(self, layer: int) -> dict[str, tuple[int, int, int | None]]:
        """`{module: (in_features, out_features, num_experts or None)}` of one global layer."""
        attention = _mla(self) if self.architecture == "DeepseekV3ForCausalLM" else _gqa(self)
        d, hidden = self.dims, self.hidden_size
        if layer not in self.moe_layers:
            return attention | _mlp("mlp", hidden, d["intermediate"], None)
        modules = attention | _mlp("experts", hidden, d["moe_intermediate"], self.num_experts)
        if d["shared_intermediate"]:
            modules |= _mlp("shared_expert", hidden, d["shared_intermediate"], None)
        return modules


def _qwen3_moe(c: Mapping[str, Any]) -> ModelShape:
    sparse_step = c.get("decoder_sparse_step", 1)
    dense = set(c.get("mlp_only_layers") or ())
    experts = c["num_experts"] if "num_experts" in c else c["num_local_experts"]  # transformers 5
    moe_layers = tuple(
        i
        for i in range(c["num_hidden_layers"])
        if i not in dense and experts > 0 and (i + 1) % sparse_step == 0
    )
    dims = {
        "heads": c["num_attention_heads"],
        "kv_heads": c["num_key_value_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "intermediate": c["intermediate_size"],
        "moe_intermediate": c["moe_intermediate_size"],
        "shared_intermediate": 0,
    }
    return _shape(c, experts, moe_layers, dims)


def _deepseek_v3(c: Mapping[str, Any]) -> ModelShape:
    freq = c.get("moe_layer_freq", 1)
    moe_layers = tuple(
        i
        for i in range(c["num_hidden_layers"])
        if i >= c["first_k_dense_replace"] and i % freq == 0
    )
    dims = {
        "heads": c["num_attention_heads"],
        "q_lora_rank": c.get("q_lora_rank") or 0,
        "kv_lora_rank": c["kv_lora_rank"],
        "rope_dim": c["qk_rope_head_dim"],
        "nope_dim": c["qk_nope_head_dim"],
        "v_dim": c["v_head_dim"],
        "intermediate": c["intermediate_size"],
        "moe_intermediate": c["moe_intermediate_size"],
        "shared_intermediate": c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0),
    }
    return _shape(c, c["n_routed_experts"], moe_layers, dims)


def _shape(c, num_experts: int, moe_layers: tuple[int, ...], dims: dict[str, int]) -> ModelShape:
    return ModelShape(
        architecture=c["architectures"][0],
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        vocab_size=c["vocab_size"],
        max_positions=c["max_position_embeddings"],
        num_experts=num_experts,
        top_k=c["num_experts_per_tok"],
        moe_layers=moe_layers,
        dims=dims,
    )


def _gqa(shape: ModelShape) -> dict[str, tuple[int, int, int | None]]:
    d, hidden = shape.dims, shape.hidden_size
    q_out, kv_out = d["heads"] * d["head_dim"], d["kv_heads"] * d["head_dim"]
    return {
        "q_proj": (hidden, q_out, None),
        "k_proj": (hidden, kv_out, None),
        "v_proj": (hidden, kv_out, None),
        "o_proj": (q_out, hidden, None),
    }


def _mla(shape: ModelShape) -> dict[str, tuple[int, int, int | None]]:
    d, hidden = shape.dims, shape.hidden_size
    q_out = d["heads"] * (d["nope_dim"] + d["rope_dim"])
    modules: dict[str, tuple[int, int, int | None]]
    if d["q_lora_rank"]:
        modules = {
            "q_a_proj": (hidden, d["q_lora_rank"], None),
            "q_b_proj": (d["q_lora_rank"], q_out, None),
        }
    else:
        modules = {"q_proj": (hidden, q_out, None)}
    return modules | {
        "kv_a_proj": (hidden, d["kv_lora_rank"] + d["rope_dim"], None),
        "kv_b_proj": (d["kv_lora_rank"], d["heads"] * (d["nope_dim"] + d["v_dim"]), None),
        "o_proj": (d["heads"] * d["v_dim"], hidden, None),
    }


def _mlp(prefix: str, hidden: int, width: int, experts: int | None):
    return {
        f"{prefix}.gate": (hidden, width, experts),
        f"{prefix}.up": (hidden, width, experts),
        f"{prefix}.down": (width, hidden, experts),
    }


@dataclass(frozen=True)
class AdapterSpec:
    """All sites of one adapter, in layer order."""

    shape: ModelShape
    sites: tuple[Site, ...]

    @classmethod
    def build(cls, shape: ModelShape, config: AdapterConfig) -> AdapterSpec:
        """Raises ConfigError for a target that the model lacks or that vLLM cannot serve."""
        available = [shape.modules(layer) for layer in range(shape.num_layers)]
        names = {name: None for modules in available for name in modules}
        _check_targets(config.targets, list(names), shape.architecture)
        sites = tuple(
            _site(layer, name, *dims, config)
            for layer, modules in enumerate(available)
            for name, dims in modules.items()
            if name not in NOT_SERVABLE and any(fnmatchcase(name, t) for t in config.targets)
        )
        return cls(shape, sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

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

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes.values())


def _site(layer, module, in_features, out_features, experts, config: AdapterConfig) -> Site:
    rank, alpha = config.rank, config.alpha
    if experts is not None:
        rank = config.expert_rank or rank
        alpha = config.expert_alpha or alpha
    scale = alpha / (math.sqrt(rank) if config.rslora else rank)
    return Site(layer, module, in_features, out_features, rank, scale, experts)


def _check_targets(targets: tuple[str, ...], names: list[str], architecture: str) -> None:
    servable = [name for name in names if name not in NOT_SERVABLE]
    for target in targets:
        if target in NOT_SERVABLE and target in names:
            raise ConfigError(
                f"adapter.targets names {target}: {NOT_SERVABLE[target]}; leave it out"
            )
        if not any(fnmatchcase(name, target) for name in servable):
            raise ConfigError(
                f"adapter.targets: {architecture} has no module that matches {target!r}; it has "
                f"{', '.join(servable)}"
            )
