"""Which layers have routed experts, and how wide shared experts are, as config.json has it."""

from __future__ import annotations

from lora_moe_rl.adapters.families.common.family import Config


def every_layer(c: Config) -> tuple[int, ...]:
    return tuple(range(c["num_hidden_layers"]))


def sparse_steps(c: Config) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer that is not named as dense."""
    step, dense = c.get("decoder_sparse_step", 1), set(c.get("mlp_only_layers") or ())
    return tuple(i for i in every_layer(c) if i not in dense and (i + 1) % step == 0)


def after_the_first(c: Config) -> tuple[int, ...]:
    """All but the first `first_k_dense_replace` layers, or every `moe_layer_freq`-th of them."""
    first, freq = c["first_k_dense_replace"], c.get("moe_layer_freq", 1)
    return tuple(i for i in every_layer(c) if i >= first and i % freq == 0)


def shared_experts(c: Config) -> int:
    """The width of the shared experts of a layer as one linear."""
    return c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0)
