"""Variants of the supported families that trainer and engine would not compute as trained.

A config.json can ask for things that Megatron-core, Megatron-Bridge or vLLM ignore; the model would
load, and be silently another one. They are refused here, before anything starts. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lora_moe_rl.errors import ModelError

Config = Mapping[str, Any]

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
_SIGMOID = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
_MLA = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def check_variant(architecture: str, config: Config) -> None:
    """Raises ModelError, naming the key, its value and the reason, for what is refused."""
    for reason in _refused(architecture, config):
        raise ModelError(f"config.json of {architecture}: {reason}")


def _refused(architecture: str, c: Config) -> Iterator[str]:
    if (act := c.get("hidden_act", "silu")) != "silu":
        yield f"hidden_act={act!r} is not supported; only 'silu' is"
    for key in ("tie_word_embeddings", "mlp_bias"):
        if c.get(key):
            yield f"{key}=true is not supported: no published model of this family has it"
    if c.get("attention_bias") and architecture != "Glm4MoeForCausalLM":
        yield "attention_bias=true is not supported for this family: Megatron-Bridge has no place"
    yield from _window(architecture, c)
    yield from _rope(architecture, c.get("rope_parameters") or c.get("rope_scaling") or {})
    yield from _router(architecture, c)


def _window(architecture: str, c: Config) -> Iterator[str]:
    if c.get("use_sliding_window"):
        yield "use_sliding_window=true is not supported: the trainer attends to all tokens"
    window = c.get("sliding_window") if architecture == "MixtralForCausalLM" else None
    if window and window < c.get("max_position_embeddings", 0):
        yield (
            f"sliding_window={window} is not supported: the trainer attends to all tokens; for "
            f"sequences of at most {window} tokens set max_position_embeddings to {window}"
        )


def _rope(architecture: str, rope: Config) -> Iterator[str]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    allowed = ("default", "yarn") if architecture in _MLA else ("default",)
    if kind not in allowed:
        yield f"rope type {kind!r} is not supported for this family; supported: {allowed}"
    if unknown := sorted(set(rope) - _ROPE_KEYS):
        yield f"rope parameters {', '.join(unknown)} are not known to Megatron-Bridge"
    if kind == "yarn" and "original_max_position_embeddings" not in rope:
        yield "yarn rope needs original_max_position_embeddings, or Megatron-core assumes 4096"


def _router(architecture: str, c: Config) -> Iterator[str]:
    top_k, normalised = c.get("num_experts_per_tok"), c.get("norm_topk_prob")
    if architecture in _SIGMOID:
        if normalised is False:
            yield "norm_topk_prob=false is not supported: Megatron-core divides sigmoid scores"
        normalised = True
    if architecture == "DeepseekV2ForCausalLM" and normalised:
        yield "norm_topk_prob=true is not supported: transformers ignores it, vLLM does not"
    if top_k == 1 and (normalised or architecture == "MixtralForCausalLM"):
        yield "num_experts_per_tok=1 with normalised scores: every score would be 1 or not divided"
    yield from _scoring(architecture, c.get("scoring_func"), c.get("topk_method"))


def _scoring(architecture: str, function: str | None, method: str | None) -> Iterator[str]:
    """Configs written by transformers lack both keys; vLLM then fails to load DeepSeek-V3."""
    pair = f"scoring_func={function!r} with topk_method={method!r} is not supported"
    if architecture == "DeepseekV2ForCausalLM":
        methods = (None, "greedy", "group_limited_greedy")
        if function not in (None, "softmax") or method not in methods:
            yield f"{pair}; DeepSeek-V2 has softmax with greedy or group_limited_greedy"
    known = ((None, None), ("sigmoid", "noaux_tc"))
    if architecture == "DeepseekV3ForCausalLM" and (function, method) not in known:
        yield f"{pair}; DeepSeek-V3 has sigmoid with noaux_tc"
