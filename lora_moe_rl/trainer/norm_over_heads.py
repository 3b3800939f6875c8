"""Norms over all heads of the queries, or of the keys, together (OLMoE, MiniMax-M2).

megatron-core norms each head by itself. Megatron-Bridge has two norms of its own, neither of which
is right under tensor parallelism: OLMoE's (`olmoe_provider.py`) is as wide as all heads on every
rank, and that of MiniMax-M2 (`minimax_m2_provider.py`) adds up squares over the ranks, and not
their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.upstream.checks import require_version

WHO = "lora_moe_rl/trainer/norm_over_heads.py"


class NormOverHeads(torch.nn.Module):
    """RMSNorm of x `[s, b, heads / tp, d]` over all heads of a token, with this rank's part of the
    weight, `[heads / tp * d]`. Whatever the context parallelism: a rank has all heads of its tokens
    until attention exchanges them."""

    def __init__(self, hidden_size: int, config, eps: float, heads: str):
        """`hidden_size`: of one head; `heads`: the config's name of the number of all."""
        super().__init__()
        total, tp = getattr(config, heads), config.tensor_model_parallel_size
        if total % tp:
            raise ConfigError(f"trainer.tp={tp} does not divide the model's {heads}={total}")
        self.eps, self.width = eps, total * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(total // tp * hidden_size))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Kept for the backward is x as it is, and no copy: keys are a view of the projection.
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
        scale = (_over_ranks(norm.square()) / self.width + self.eps).rsqrt()
        return (x * scale * self.weight.view(x.shape[-2:])).to(x.dtype)


def _over_ranks(squares: torch.Tensor) -> torch.Tensor:
    """The sum over tensor-parallel ranks: each uses it for its heads, so that the gradient of it is
    the sum of theirs."""
    return copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))


def with_engine(config, vp_stage=None):
    """Transformer Engine's block spec, where upstream's of the family builds norms of its own."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def placed(block_spec: Callable) -> Callable:
    """The block spec with these norms."""
    require_version("megatron-core", WHO)

    def spec(config, vp_stage=None):  # which Bridge looks for by name
        specs = block_spec(config, vp_stage=vp_stage)
        for layer in specs.layer_specs:
            attention = layer.submodules.self_attention
            if attention.module is not SelfAttention:
                raise ConfigError(f"{WHO} expects SelfAttention, not {attention.module}")
            norms = attention.submodules
            norms.q_layernorm = partial(NormOverHeads, heads="num_attention_heads")
            norms.k_layernorm = partial(NormOverHeads, heads="num_query_groups")
        return specs

    return spec
