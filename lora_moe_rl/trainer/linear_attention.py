"""Gated DeltaNet of Megatron-core without flash-linear-attention, in local specs.

mcore's layer (`core/ssm/gated_delta_net`) is built, loaded and cut over ranks as it is. Its forward
wants kernels of flash-linear-attention for packed sequences, and what it has in plain torch takes
none. Here every sequence is a row of a right-padded batch (`packed_sequences.py`), and starts with
no state and nothing before it in the convolution: nothing of one sample reaches another, and what
stands behind a row's last token reaches nothing. Where a prompt is fed once for several samples,
each of them has a row that begins with it. Of cp ranks each has all tokens, with its share of the
heads, from the convolution to the rule (`context_parallel.py`): a state goes through whole samples.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec

from lora_moe_rl.kernels.unit_length import unit_length
from lora_moe_rl.trainer.context_parallel import own_tokens, side_by_side
from lora_moe_rl.trainer.local_modules import local_norm, placed
from lora_moe_rl.trainer.packed_sequences import PackedParams
from lora_moe_rl.upstream.checks import require_attributes, require_version

WHO = "lora_moe_rl/trainer/linear_attention.py"


class _OutNorm:
    """`local_norm` as a class: mcore takes a function here for a module that is built already."""

    def __new__(cls, **kwargs):
        return local_norm(**kwargs)


class PackedGatedDeltaNet(GatedDeltaNet):
    """F tokens fed, of which this rank has a slice under tensor parallelism."""

    def __init__(self, config, submodules, **kwargs):
        found = common.HAVE_FLA
        common.HAVE_FLA = True  # without which the constructor refuses, and which we do not use
        try:
            super().__init__(config, submodules, use_qk_l2norm=False, **kwargs)
        finally:
            common.HAVE_FLA = found

    def _setup_variant_attrs(self):
        super()._setup_variant_attrs()
        rule: Any = common.torch_chunk_gated_delta_rule
        self.gated_delta_rule = rule

    def forward(self, hidden_states, attention_mask=None, packed_seq_params: Any = None, **_):  # pyright: ignore[reportIncompatibleMethodOverride]
        """hidden_states `[F / cp / tp, 1, hidden]`; returns such an output, and no bias."""
        if not isinstance(packed_seq_params, PackedParams):
            raise ValueError("PackedGatedDeltaNet takes packed sequences only (packed_seq_params)")
        fused, _ = self.in_proj(hidden_states)
        # The widths of what comes out of it, as one of cp ranks has them of all tokens.
        widths = self.feat_dim_split
        of_own = fused.squeeze(1).split([width * self.cp_size for width in widths], dim=-1)
        qkv, gate, beta, decay = of_own
        if self.cp_size > 1:
            parts = *qkv.split(self._qkv_widths(), dim=-1), beta, decay
            of_all = side_by_side(parts, self.pg_collection.cp)
            qkv, beta, decay = of_all.split((widths[0], *widths[2:]), dim=-1)
        attended = self._attend(qkv, beta, decay, packed_seq_params)
        if self.cp_size > 1:
            attended = own_tokens(attended.flatten(1), self.pg_collection.cp)
            attended = attended.unflatten(1, (-1, self.value_head_dim))
        normed = self._apply_gated_norm(attended, gate.reshape(attended.shape))
        normed = normed.view(*fused.shape[:2], -1)
        return self.out_proj(normed)

    def _attend(self, qkv, beta, decay, params: PackedParams):
        """Attention of all tokens fed, `[F, …]`; returns `[F, value heads / cp, d]`."""
        sizes = [math.prod(batch.keys) for batch in params.batches]
        rows = (_rows(x, params, sum(sizes)).split(sizes) for x in (qkv, beta, decay))
        found = [
            self._batch(*(x.unflatten(0, batch.keys) for x in one)).flatten(0, 1)
            for *one, batch in zip(*rows, params.batches, strict=True)
        ]
        assert params.whole is not None
        return torch.cat(found).index_select(0, params.whole)

    def _batch(self, qkv, beta, decay):
        """Attention of sequences `[n, longest, …]`, each from its beginning."""
        n, longest, _ = qkv.shape
        convolution = self._of_heads(self.conv1d.weight, self._qkv_widths())
        past = F.pad(qkv.transpose(1, 2), (convolution.shape[-1] - 1, 0))
        mixed = self.act_fn(F.conv1d(past, convolution, groups=past.shape[1]))
        query, key, value, _, beta, decay = self._prepare_input_for_gated_delta_rule(
            mixed.transpose(1, 2), beta, n, longest, beta, decay
        )
        own = (self._of_heads(x, [len(x)]) for x in (self.A_log, self.dt_bias))
        decay, beta = self._compute_g_and_beta(*own, decay, beta)
        out, _ = self.gated_delta_rule(
            unit_length(query), unit_length(key), value, g=decay, beta=beta
        )
        return out

    def _qkv_widths(self) -> list[int]:
        """The widths of queries, keys and values, of all heads of this tensor-parallel rank."""
        return [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]

    def _of_heads(self, parameter: torch.Tensor, sections: list[int]) -> torch.Tensor:
        """The heads that this rank has of all tokens, out of each of the sections, which stand one
        after the other in dimension 0."""
        if self.cp_size == 1:
            return parameter
        mine = self.pg_collection.cp.rank()
        parts = parameter.split(sections)
        return torch.cat([part.chunk(self.cp_size)[mine] for part in parts])


def _rows(x: torch.Tensor, params: PackedParams, places: int) -> torch.Tensor:
    """The tokens fed `[F, …]` at the places of the batches' sequences."""
    if params.keys is None:
        assert params.places is not None
        return placed(x, params.places, places)
    return x.index_select(0, params.keys)


def with_linear_attention(spec, config, vp_stage=None):
    """Puts the layer above into a local block spec, in the place of attention, in the layers that
    `config.linear_attention_freq` marks with 1; returns the spec."""
    kinds = config.linear_attention_freq
    if kinds is None:
        return spec
    require_version("megatron-core", WHO)
    require_attributes(GatedDeltaNet, ("_apply_gated_norm", "_compute_g_and_beta"), WHO)
    layout = config.pipeline_model_parallel_layout
    numbers = range(len(kinds))
    if layout is not None:
        numbers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    submodules = GatedDeltaNetSubmodules(ColumnParallelLinear, _OutNorm, RowParallelLinear)
    attention = ModuleSpec(module=PackedGatedDeltaNet, submodules=submodules)
    for at, number in enumerate(numbers):
        if kinds[number]:
            layer = spec.layer_specs[at] = copy.copy(spec.layer_specs[at])
            layer.submodules = copy.copy(layer.submodules)
            layer.submodules.self_attention = attention
    return spec
