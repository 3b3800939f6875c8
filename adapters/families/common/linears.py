"""The linears of a layer, with their sizes, by kind of attention and of MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lora_moe_rl.adapters.families.common.family import Config, Dims


class Attention(NamedTuple):
    """`dims` reads sizes from config.json; `linears` are a layer's, given them and the hidden
    size."""

    dims: Callable[[Config], dict[str, int]]
    linears: Callable[[Mapping[str, int], int], dict[str, Dims]]


def mlp(prefix: str, hidden: int, width: int, experts: int | None) -> dict[str, Dims]:
    return {
        f"{prefix}.gate": (hidden, width, experts),
        f"{prefix}.up": (hidden, width, experts),
        f"{prefix}.down": (width, hidden, experts),
    }


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


def _gqa(d: Mapping[str, int], hidden: int) -> dict[str, Dims]:
    q_out, kv_out = d["heads"] * d["head_dim"], d["kv_heads"] * d["head_dim"]
    return {
        "q_proj": (hidden, q_out, None),
        "k_proj": (hidden, kv_out, None),
        "v_proj": (hidden, kv_out, None),
        "o_proj": (q_out, hidden, None),
    }


def _fused_gqa(d: Mapping[str, int], hidden: int) -> dict[str, Dims]:
    """query_key_value has the queries of all heads, then their keys, then all values."""
    outputs = sum(blocks("query_key_value", d))
    o_proj = _gqa(d, hidden)["o_proj"]
    return {"query_key_value": (hidden, outputs, None), "o_proj": o_proj}


def _gated_gqa(d: Mapping[str, int], hidden: int) -> dict[str, Dims]:
    """q_proj has of each head its query, then the gate of its output."""
    linears = _gqa(d, hidden)
    inputs, outputs, _ = linears["q_proj"]
    return linears | {"q_proj": (inputs, 2 * outputs, None)}


def _delta_dims(c: Config) -> dict[str, int]:
    return {
        "linear_key_heads": c["linear_num_key_heads"],
        "linear_value_heads": c["linear_num_value_heads"],
        "linear_key_dim": c["linear_key_head_dim"],
        "linear_value_dim": c["linear_value_head_dim"],
        "linear_kernel": c["linear_conv_kernel_dim"],
    }


def _delta(d: Mapping[str, int], hidden: int) -> dict[str, Dims]:
    """in_proj_qkvz has of each key head its query, its key, the values and the output gates of its
    value heads; in_proj_ba their betas and decays."""
    keys = d["linear_key_heads"] * d["linear_key_dim"]
    values = d["linear_value_heads"] * d["linear_value_dim"]
    return {
        "in_proj_qkvz": (hidden, 2 * keys + 2 * values, None),
        "in_proj_ba": (hidden, 2 * d["linear_value_heads"], None),
        "out_proj": (values, hidden, None),
    }


def _separate_delta(d: Mapping[str, int], hidden: int) -> dict[str, Dims]:
    """in_proj_qkv has the queries of all heads, then their keys, then all values; output gates,
    betas and decays are linears of their own."""
    queries, keys, values = blocks("in_proj_qkv", d)
    heads = d["linear_value_heads"]
    return {
        "in_proj_qkv": (hidden, queries + keys + values, None),
        "in_proj_z": (hidden, values, None),
        "in_proj_b": (hidden, heads, None),
        "in_proj_a": (hidden, heads, None),
        "out_proj": (values, hidden, None),
    }


def blocks(module: str, d: Mapping[str, int]) -> tuple[int, ...]:
    """The outputs of a linear that has several in one, side by side, of which each is cut over
    ranks by itself; () of any other."""
    if module == "query_key_value":
        keys = d["kv_heads"] * d["head_dim"]
        return d["heads"] * d["head_dim"], keys, keys
    if module != "in_proj_qkv":
        return ()
    keys = d["linear_key_heads"] * d["linear_key_dim"]
    return keys, keys, d["linear_value_heads"] * d["linear_value_dim"]


def _mla(d: Mapping[str, int], hidden: int) -> dict[str, Dims]:
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


ATTENTION = {
    "gqa": Attention(_gqa_dims, _gqa),
    "fused_gqa": Attention(_gqa_dims, _fused_gqa),
    "gated_gqa": Attention(_gqa_dims, _gated_gqa),
    "mla": Attention(_mla_dims, _mla),
    "gated_delta": Attention(_delta_dims, _delta),
    "separate_delta": Attention(_delta_dims, _separate_delta),
}
