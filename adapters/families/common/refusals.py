"""Reasons to refuse a variant that trainer and engine would not compute as it was trained.

A config.json can ask for things that Megatron-core, Megatron-Bridge or vLLM ignore; the model would
load, and be silently another one. A family's `refused` chooses from these, and adds its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lora_moe_rl.adapters.families.common.family import Config

AS_NUMBERS = "`lora-moe-rl dequantise MODEL --out DIR` writes it as numbers"
MLA_ROPES = ("default", "yarn")
_ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
}


def usual(
    c: Config,
    ropes: tuple[str, ...] = ("default",),
    attention_bias: bool = False,
    rope_keys: tuple[str, ...] = (),
) -> Iterator[str]:
    """What every family refuses. `ropes`: the types of rotary embedding that it has; `rope_keys`:
    parameters of it that it alone has; `attention_bias`: whether it has members with one."""
    if (act := c.get("hidden_act", "silu")) != "silu":
        yield f"hidden_act={act!r} is not supported; only 'silu' is"
    yield from tied(c)
    if c.get("mlp_bias"):
        yield "mlp_bias=true is not supported: no published model of this family has it"
    if c.get("attention_bias") and not attention_bias:
        yield "attention_bias=true is not supported for this family: Megatron-Bridge has no place"
    if c.get("use_sliding_window"):
        yield "use_sliding_window=true is not supported: the trainer attends to all tokens"
    one, other = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
    if one and other and _kind(one) != _kind(other):
        yield f"rope_parameters has the rope type {_kind(one)!r}, rope_scaling {_kind(other)!r}"
    yield from _rope(one or other, ropes, rope_keys)


def tied(c: Config, unsaid: bool = False) -> Iterator[str]:
    """`unsaid`: whether the head of a model that does not say so is its embedding."""
    if c.get("tie_word_embeddings", unsaid):
        yield (
            "tie_word_embeddings=true is not supported: trainer and planner want embedding and "
            "head as two; `lora-moe-rl untie MODEL --out DIR` writes the same model with two"
        )


def _kind(rope: Config) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope(rope: Config, allowed: tuple[str, ...], keys: tuple[str, ...]) -> Iterator[str]:
    kind = _kind(rope)
    if kind not in allowed:
        yield f"rope type {kind!r} is not supported for this family; supported: {allowed}"
    if unknown := sorted(set(rope) - _ROPE_KEYS - set(keys)):
        yield f"rope parameters {', '.join(unknown)} are not known to Megatron-Bridge"
    if kind == "yarn" and "original_max_position_embeddings" not in rope:
        yield "yarn rope needs original_max_position_embeddings, or Megatron-core assumes 4096"


def quantised(c: Config) -> Iterator[str]:
    """Of a family whose published numbers nobody has compared with a quantised base here."""
    if c.get("quantization_config"):
        yield (
            "quantization_config is not supported for this family, whose quantised base nobody has "
            f"compared with its numbers here; {AS_NUMBERS}"
        )


def interleaved_rope(c: Config) -> Iterator[str]:
    """Of MLA: pairs of rotary embeddings stand next to each other, in vLLM and in Megatron-core."""
    if c.get("rope_interleave") is False:
        yield "rope_interleave=false is not supported: engines and trainer rotate neighbours"


def one_expert(c: Config, normalised: bool | None) -> Iterator[str]:
    """`normalised`: whether the scores of the chosen experts are made to add up to one."""
    if c.get("num_experts_per_tok") == 1 and normalised:
        yield "num_experts_per_tok=1 with normalised scores: every score would be 1 or not divided"


def dense_first(c: Config) -> Iterator[str]:
    """transformers goes by mlp_layer_types, vLLM and Megatron-Bridge by first_k_dense_replace."""
    first, layers = c.get("first_k_dense_replace"), c["num_hidden_layers"]
    if first is None:
        yield "first_k_dense_replace is missing: vLLM fails to load the model without it"
        return
    kinds = c.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if list(kinds) != ["dense"] * first + ["sparse"] * (layers - first):
        yield f"first_k_dense_replace={first!r} and mlp_layer_types differ in what is dense"
    if (freq := c.get("moe_layer_freq", 1)) != 1:
        yield f"moe_layer_freq={freq!r} is not supported: transformers knows no such key"


def sigmoid_router(c: Config) -> Iterator[str]:
    if c.get("norm_topk_prob") is False:
        yield "norm_topk_prob=false is not supported: Megatron-core divides sigmoid scores"
    yield from one_expert(c, normalised=True)


def scoring(c: Config, known: Collection[tuple[str | None, str | None]], has: str) -> Iterator[str]:
    """`known`: pairs of `scoring_func` and `topk_method`, None for a key that is left out; `has`
    tells users what they are."""
    function, method = c.get("scoring_func"), c.get("topk_method")
    if (function, method) not in known:
        yield f"scoring_func={function!r} with topk_method={method!r} is not supported; {has}"
