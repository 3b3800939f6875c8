"""MLA whose query is not compressed (DeepSeek-V2-Lite, Moonlight: no `q_lora_rank`).

megatron-core (`core/transformer/mla_qk_norm_config.py`) gives such a query a norm as soon as
the compressed key/value has one: with Transformer Engine it fuses into `linear_q_proj` a norm that
no checkpoint has and that changes the function, and with local specs it refuses to build. These
models have no such norm.
"""

from __future__ import annotations

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.upstream.checks import require_attributes, require_version

WHO = "lora_moe_rl/trainer/mla_query.py"


class PlainQueryMLA(MLASelfAttention):
    """MLASelfAttention that builds `linear_q_proj` as its spec says."""

    def _resolve_qk_norm_config(self, submodules):
        resolver = QKNormConfigResolver(self.config, submodules)
        require_attributes(resolver, ("has_q_lora",), WHO)
        resolver.has_q_lora = True  # so that only the key/value's norm is decided on
        return resolver.resolve() | {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "q_layernorm": IdentityOp,
        }


def without_query_norm(spec, config):
    """Replaces the attention of a block spec in place where the query is not compressed; returns
    the spec."""
    if config.multi_latent_attention and config.q_lora_rank is None:
        require_version("megatron-core", WHO)
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention
            if attention.module not in (MLASelfAttention, PlainQueryMLA):
                raise ConfigError(
                    f"{WHO} expects MLASelfAttention, not {attention.module}: the "
                    "upstream code has changed"
                )
            attention.module = PlainQueryMLA
    return spec
