"""Model families, and what the rest of the system needs to know of a model's `config.json`.

All that is particular to a family stands in its entry of `FAMILIES`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lora_moe_rl.adapters.variants import check_variant
from lora_moe_rl.errors import ModelError

Config = Mapping[str, Any]
# (in_features, out_features, number of routed experts or None) of one linear
Dims = tuple[int, int, int | None]


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face.

    `moe_layers` gives the global numbers of the layers with routed experts. `shared_expert` is its
    Hugging Face name below `mlp`, and `shared_width` its width (0: the model has none). `moe_block`
    and `expert_names` (gate, up, down) are the names that checkpoints, vLLM and adapters use for
    routed experts. `not_served` says why vLLM cannot serve adapters of the family; '' if it can.
    """

    title: str
    model_types: tuple[str, ...]
    attention: Literal["gqa", "mla"]
    moe_layers: Callable[[Config], tuple[int, ...]]
    moe_width: str = "moe_intermediate_size"
    shared_expert: str | None = None
    shared_width: Callable[[Config], int] = lambda c: 0
    moe_block: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    not_served: str = ""


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes. `dims` depends on the attention: see `_gqa_dims` and `_mla_dims`."""

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
    def from_hf_config(cls, config: Config) -> ModelShape:
        """Raises ModelError for an architecture or a variant that is not supported, or a missing
        key."""
        architecture = str((config.get("architectures") or ["missing"])[0])
        family = FAMILIES.get(architecture)
        if family is None:
            listing = "; ".join(f"{name}: {f.title}" for name, f in FAMILIES.items())
            raise ModelError(
                f"architecture {architecture} is not supported; supported are {listing}"
            )
        check_variant(architecture, config)
        try:
            return _read(family, architecture, config)
        except KeyError as error:
            raise ModelError(f"config.json of {architecture} lacks the key {error}") from error

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    def modules(self, layer: int) -> dict[str, Dims]:
        """`{module: (in_features, out_features, num_experts or None)}` of one global layer."""
        attention = _mla(self) if self.family.attention == "mla" else _gqa(self)
        d, hidden = self.dims, self.hidden_size
        if layer not in self.moe_layers:
            return attention | _mlp("mlp", hidden, d["intermediate"], None)
        modules = attention | _mlp("experts", hidden, d["moe_intermediate"], self.num_experts)
        if d["shared_intermediate"]:
            modules |= _mlp("shared_expert", hidden, d["shared_intermediate"], None)
        return modules


def hf_path(shape: ModelShape, module: str) -> str:
    """The path of a canonical module below `model.layers.N`, as checkpoints and PEFT files have it.

    `{}` stands for the expert: `mlp.experts.{}.gate_proj`.
    """
    family = shape.family
    block, _, part = module.rpartition(".")
    if block == "experts":
        name = family.expert_names[("gate", "up", "down").index(part)]
        return f"{family.moe_block}.experts.{{}}.{name}"
    if block == "shared_expert":
        return f"mlp.{family.shared_expert}.{part}_proj"
    if block == "mlp":
        return f"mlp.{part}_proj"
    return f"self_attn.{'kv_a_proj_with_mqa' if module == 'kv_a_proj' else module}"


def _read(family: Family, architecture: str, c: Config) -> ModelShape:
    dims = _mla_dims(c) if family.attention == "mla" else _gqa_dims(c)
    # transformers 5 writes num_local_experts for Qwen3-MoE, whose published configs do not.
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((c[key] for key in keys if key in c), None)
    if experts is None:
        raise KeyError(" or ".join(keys))
    return ModelShape(
        architecture=architecture,
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        vocab_size=c["vocab_size"],
        max_positions=c["max_position_embeddings"],
        num_experts=experts,
        top_k=c["num_experts_per_tok"],
        moe_layers=family.moe_layers(c) if experts > 0 else (),
        dims=dims
        | {
            "intermediate": c["intermediate_size"],
            "moe_intermediate": c[family.moe_width],
            "shared_intermediate": family.shared_width(c),
        },
    )


def _gqa_dims(c: Config) -> dict[str, int]:
    return {
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
    }


def _mla_dims(c: Config) -> dict[str, int]:
    return {
        "heads": c["num_attention_heads"],
        "q_lora_rank": c.get("q_lora_rank") or 0,
        "kv_lora_rank": c["kv_lora_rank"],
        "rope_dim": c["qk_rope_head_dim"],
        "nope_dim": c["qk_nope_head_dim"],
        "v_dim": c["v_head_dim"],
    }


def _gqa(shape: ModelShape) -> dict[str, Dims]:
    d, hidden = shape.dims, shape.hidden_size
    q_out, kv_out = d["heads"] * d["head_dim"], d["kv_heads"] * d["head_dim"]
    return {
        "q_proj": (hidden, q_out, None),
        "k_proj": (hidden, kv_out, None),
        "v_proj": (hidden, kv_out, None),
        "o_proj": (q_out, hidden, None),
    }


def _mla(shape: ModelShape) -> dict[str, Dims]:
    d, hidden = shape.dims, shape.hidden_size
    q_out = d["heads"] * (d["nope_dim"] + d["rope_dim"])
    modules: dict[str, Dims]
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


def _mlp(prefix: str, hidden: int, width: int, experts: int | None) -> dict[str, Dims]:
    return {
        f"{prefix}.gate": (hidden, width, experts),
        f"{prefix}.up": (hidden, width, experts),
        f"{prefix}.down": (width, hidden, experts),
    }


def _every_layer(c: Config) -> tuple[int, ...]:
    return tuple(range(c["num_hidden_layers"]))


def _sparse_steps(c: Config) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer that is not named as dense."""
    step, dense = c.get("decoder_sparse_step", 1), set(c.get("mlp_only_layers") or ())
    return tuple(i for i in _every_layer(c) if i not in dense and (i + 1) % step == 0)


def _after_the_first(c: Config) -> tuple[int, ...]:
    """All but the first `first_k_dense_replace` layers, or every `moe_layer_freq`-th of them."""
    first, freq = c["first_k_dense_replace"], c.get("moe_layer_freq", 1)
    return tuple(i for i in _every_layer(c) if i >= first and i % freq == 0)


def _shared_experts(c: Config) -> int:
    """The shared experts of a layer as one linear."""
    return c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0)


FAMILIES: dict[str, Family] = {
    "Qwen3MoeForCausalLM": Family(
        title="Qwen3-MoE (GQA, qk-norm, softmax router)",
        model_types=("qwen3_moe",),
        attention="gqa",
        moe_layers=_sparse_steps,
    ),
    "Qwen2MoeForCausalLM": Family(
        title="Qwen2-MoE, Qwen1.5-MoE (GQA with bias, softmax router, gated shared expert)",
        model_types=("qwen2_moe",),
        attention="gqa",
        moe_layers=_sparse_steps,
        shared_expert="shared_expert",
        shared_width=lambda c: c["shared_expert_intermediate_size"],
    ),
    "MixtralForCausalLM": Family(
        title="Mixtral (GQA, softmax router, every layer MoE)",
        model_types=("mixtral",),
        attention="gqa",
        moe_layers=_every_layer,
        moe_width="intermediate_size",
        moe_block="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
    ),
    "DeepseekV2ForCausalLM": Family(
        title="DeepSeek-V2 (MLA, softmax router, shared experts)",
        model_types=("deepseek_v2",),
        attention="mla",
        moe_layers=_after_the_first,
        shared_expert="shared_experts",
        shared_width=_shared_experts,
    ),
    "DeepseekV3ForCausalLM": Family(
        title="DeepSeek-V3, Moonlight, Kimi-K2 (MLA, sigmoid router, shared experts)",
        model_types=("deepseek_v3", "kimi_k2"),
        attention="mla",
        moe_layers=_after_the_first,
        shared_expert="shared_experts",
        shared_width=_shared_experts,
    ),
    "Glm4MoeForCausalLM": Family(
        title="GLM-4.5 (GQA, sigmoid router, shared experts)",
        model_types=("glm4_moe",),
        attention="gqa",
        moe_layers=_after_the_first,
        shared_expert="shared_experts",
        shared_width=_shared_experts,
    ),
}
