"""Mend for vLLM on the CPU: gated DeltaNet in float32.

Upstream's `vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py` asserts bfloat16, which its
C++ kernels for the recurrence are made for. Here the op of the same name is plain torch in the
dtype of the model: the caches, their slots, the batch's metadata and the projections around it are
vLLM's own. Requests are gone through one after the other. Weights of the convolution stay as they
are, where upstream packs them for its kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm import _custom_ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from lora_moe_rl.kernels.unit_length import unit_length
from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_delta.py"
ARGUMENTS = ("mixed_qkv", "b", "a", "core_attn_out", "layer_name")


def cpu_gdn_attention_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """mixed_qkv `[T, 2 keys + values]`, b and a `[T, value heads]`; fills core_attn_out
    `[T, value heads, d]`. Tokens of a step stand request after request."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a run that measures memory
        return
    batch: Any = context.attn_metadata[layer.prefix]
    if not batch.num_actual_tokens:
        return
    if batch.spec_sequence_masks is not None:
        raise RuntimeError(f"{WHO} knows no speculative decoding")
    slots = batch.non_spec_state_indices_tensor.tolist()
    ends = batch.non_spec_query_start_loc.tolist()
    fresh = [False] * batch.num_decodes
    if batch.num_prefills:
        fresh = (~batch.has_initial_state).tolist()
    conv_states, states = layer.kv_cache[0], layer.kv_cache[1]
    if not is_conv_state_dim_first():
        conv_states = conv_states.transpose(1, 2)
    beta = b.float().sigmoid()
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    for i in range(batch.num_decodes + batch.num_prefills):
        mine = slice(ends[i], ends[i + 1])
        if mine.start == mine.stop:
            continue
        past, state = conv_states[slots[i]], states[slots[i]]
        if fresh[i]:
            past.zero_()
            state.zero_()
        mixed = _convolve(mixed_qkv[mine], past, layer)
        core_attn_out[mine] = _recur(mixed, beta[mine], decay[mine], state, layer)


def _convolve(qkv: torch.Tensor, past: torch.Tensor, layer) -> torch.Tensor:
    """qkv `[T, d]` of a request after `past` `[d, kernel - 1]`, which becomes what is past then."""
    rows = torch.cat([past, qkv.t()], dim=-1)
    past.copy_(rows[:, -past.shape[1] :])
    weight = layer.conv1d.weight.view(len(rows), 1, -1)
    return F.silu(F.conv1d(rows[None], weight, layer.conv1d.bias, groups=len(rows))[0]).t()


def _recur(mixed, beta, decay, state, layer) -> torch.Tensor:
    """`[T, value heads, d]` of a request; `state` `[value heads, d of values, d of keys]` becomes
    what it is after its last token."""
    query, key, value = (x[0].float() for x in layer.rearrange_mixed_qkv(mixed))
    of_each = value.shape[1] // key.shape[1]
    query, key = (unit_length(x).repeat_interleave(of_each, dim=1) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    kept, found = state.float(), []
    for q, k, v, strength, change in zip(query, key, value, beta, decay.exp(), strict=True):
        kept = kept * change[:, None, None]
        delta = (v - (kept @ k[:, :, None])[:, :, 0]) * strength[:, None]
        kept = kept + delta[:, :, None] * k[:, None]
        found.append((kept @ q[:, :, None])[:, :, 0])
    state.copy_(kept)
    return torch.stack(found).to(mixed.dtype)


def _unpacked(weight: torch.Tensor) -> torch.Tensor:
    return weight


def install() -> None:
    """Layers register the op as they are built, by this name."""
    require_version("vllm", WHO)
    require_parameters(_custom_ops.causal_conv1d_weight_pack, ("weight",), WHO)
    _custom_ops.causal_conv1d_weight_pack = _unpacked
    require_parameters(gdn_attention.cpu_gdn_attention_core, ARGUMENTS, WHO)
    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core
