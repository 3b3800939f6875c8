"""Leaf modules for Megatron-core's local specs, used wherever Transformer Engine is not installed.

mcore's own local leaves cannot train these models: its attention refuses packed sequences and
MLA's head sizes, its norm does not carry the sequence-parallel mark, and its experts are one module
an expert. Specs are mcore's extension point for exactly this; nothing of mcore is patched but the
rotary embedding: the packed one loops over sequences in Python, and knows another way of context
parallelism.
"""

from __future__ import annotations

import inspect
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn_module
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import attention as attention_module
from megatron.core.transformer import multi_latent_attention as mla_module
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import is_layer_window_attention

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.kernels.grouped_linear import grouped_linear
from lora_moe_rl.trainer.attention_parts import attend
from lora_moe_rl.trainer.context_parallel import all_tokens, own_tokens
from lora_moe_rl.trainer.packed_sequences import PaddedBatch
from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/trainer/local_modules.py"


class ZeroCentred(torch.nn.RMSNorm):
    """RMSNorm that scales by 1 + weight, in float32."""

    def forward(self, x):
        scale = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


def local_norm(config, hidden_size: int, eps: float = 1e-5, **_) -> torch.nn.Module:
    """RMSNorm or LayerNorm whose parameters say whether they see a slice of the sequence."""
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    if config.layernorm_zero_centered_gamma:
        kind = ZeroCentred
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


class PackedAttention(torch.nn.Module):
    """Causal attention of packed sequences on `scaled_dot_product_attention`; GQA and MLA, with
    sinks and windows (`attention_parts.py`) where the model has them.

    Tokens are laid out as right-padded batches (`packed_sequences.py`), so that a micro-batch is
    a few calls: under a causal mask no real token sees the padding behind it. Of cp ranks each
    attends to all tokens, with its share of the heads (`context_parallel.py`).
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
        super().__init__()
        channels = kwargs.get("k_channels") or config.kv_channels
        self.scale = kwargs.get("softmax_scale") or channels**-0.5
        groups = kwargs["pg_collection"]
        self.cp = groups.cp
        windows = config.window_size, config.window_attn_skip_freq
        in_window = is_layer_window_attention(*windows, layer_number)
        self.window = config.window_size[0] + 1 if in_window else None  # with the query's own
        self.softmax_offset = None
        if config.softmax_type == "learnable":  # mcore's name of the sinks of a rank's heads
            heads = config.num_attention_heads // groups.tp.size()
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            sinks = torch.empty(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = torch.nn.Parameter(sinks, requires_grad=False)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise ConfigError(f"PackedAttention knows no softmax_type {config.softmax_type!r}")

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **_):
        """query `[F / cp, heads, d]`, key and value `[F / cp, kv_heads, d]`; returns
        `[F / cp, heads * d_v]`."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention takes packed sequences only (packed_seq_params)")
        if self.cp.size() == 1:
            return self._of_all(query, key, value, packed_seq_params, self.softmax_offset)
        query, key, value = all_tokens(query, key, value, self.cp)
        sinks = self.softmax_offset
        sinks = None if sinks is None else sinks.chunk(self.cp.size())[self.cp.rank()]
        return own_tokens(self._of_all(query, key, value, packed_seq_params, sinks), self.cp)

    def _of_all(self, query, key, value, params, sinks):
        """query `[F, heads, d]`, key and value `[F, kv_heads, d]`; returns `[F, heads * d_v]`.
        sinks: `[heads]` or None."""
        queries = [math.prod(batch.queries) for batch in params.batches]
        keys = [math.prod(batch.keys) for batch in params.batches]
        q = placed(query, params.places, sum(queries))
        if params.keys is None:
            k, v = (placed(x, params.places, sum(keys)) for x in (key, value))
        else:
            k, v = (x.index_select(0, params.keys) for x in (key, value))
        parts = _cut(q, queries), _cut(k, keys), _cut(v, keys)
        found = [self._attend(*one, sinks) for one in zip(*parts, params.batches, strict=True)]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole.index_select(0, params.places).flatten(1)

    def _attend(self, query, key, value, batch: PaddedBatch, sinks):
        """Attention of all places `[n, heads, d]` of a batch; returns `[n, heads, d_v]`."""
        q = query.unflatten(0, batch.queries).transpose(1, 2)
        k, v = (x.unflatten(0, batch.keys).transpose(1, 2) for x in (key, value))
        out = attend(q, k, v, self.scale, batch.mask, self.window, sinks)
        return out.transpose(1, 2).flatten(0, 1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {}


def _cut(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """The rows of each batch. One cut of all: the gradient of a slice is as large as x."""
    return (x,) if len(sizes) == 1 else x.split(sizes)


class _Placed(torch.autograd.Function):
    """The rows of x `[n, …]` at places int64 `[n]` of so many, the others zero. As `index_copy`
    does, which would keep x for a backward that has no use for it."""

    @staticmethod
    def forward(ctx, x, places, rows: int):
        ctx.save_for_backward(places)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


def placed(x: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    """See `_Placed`."""
    return _Placed.apply(x, places, rows)


class ExpertLinears(torch.nn.Module):
    """What mcore's grouped experts ask of the linears of this rank's experts."""

    parallel_mode: str

    def __init__(self, num_gemms, input_size, output_size, *, config, pg_collection, **_):
        super().__init__()
        tp = pg_collection.expt_tp.size()
        column = self.parallel_mode == "column"
        self.num_gemms = num_gemms
        self.in_features = input_size if column else input_size // tp
        self.out_features = output_size // tp if column else output_size
        self.explicit_expert_comm = tp > 1 or config.expert_model_parallel_size > 1

    def backward_dw(self):
        pass


class _GroupedLinear(ExpertLinears):
    """Linears of this rank's experts, with TE's parameter names `weight0..N` on one storage.
    `later`: without weights, until `hold` gives them."""

    def __init__(
        self, num_gemms, input_size, output_size, *, config, later: bool = False, **kwargs
    ):
        super().__init__(num_gemms, input_size, output_size, config=config, **kwargs)
        self.allreduce = config.expert_model_parallel_size == 1
        self.shape = (num_gemms, self.out_features, self.in_features)
        self.dtype = config.params_dtype
        if not later:
            # As mcore's linears: on the CPU, or inside `torch.device("meta")` without values.
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.hold(torch.zeros(self.shape, dtype=self.dtype, device=device))
        self.biases = None
        if kwargs.get("bias"):
            self._add_biases(config, later)

    def _add_biases(self, config, later: bool) -> None:
        """TE's `bias0..N`, `[out]` each, on one storage."""
        if later or config.expert_tensor_parallel_size > 1:
            raise ConfigError(
                "experts with biases are neither held once with engines nor cut over "
                "expert-tensor-parallel ranks: set trainer.etp=1, and trainer.ep for the rest"
            )
        self.biases = torch.zeros(self.shape[:2], dtype=self.dtype, device=self.stacked.device)
        for i in range(self.num_gemms):
            bias = torch.nn.Parameter(self.biases[i], requires_grad=False)
            bias.allreduce = self.allreduce
            self.register_parameter(f"bias{i}", bias)

    def hold(self, stacked: torch.Tensor) -> None:
        """Weights `[num_gemms, out, in]`, of which each expert's is a view."""
        self.stacked = stacked
        for i in range(self.num_gemms):
            weight = torch.nn.Parameter(stacked[i], requires_grad=False)
            weight.allreduce = self.allreduce
            set_tensor_model_parallel_attributes(
                weight, True, 0 if self.parallel_mode == "column" else 1, 1
            )
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x, m_splits):
        if self.weight0.data_ptr() != self.stacked.data_ptr():
            raise RuntimeError("expert weights were moved off their common storage")
        counts = list(m_splits)
        y = grouped_linear(x, self.stacked, counts)
        if self.biases is None:
            return y, None
        if self.bias0.data_ptr() != self.biases.data_ptr():
            raise RuntimeError("expert biases were moved off their common storage")
        if self.parallel_mode == "row":  # mcore weighs it by the token's probability, and adds it
            return y, list(self.biases)
        sizes = on_device(counts, y.device)
        biases = self.biases.repeat_interleave(sizes, dim=0, output_size=len(y))
        return y + biases, None


class ColumnGroupedLinear(_GroupedLinear):
    parallel_mode = "column"


class RowGroupedLinear(_GroupedLinear):
    parallel_mode = "row"


class ReplicatedLinear(torch.nn.Module):
    """A whole linear on every tensor-parallel rank, applied to its slice of the sequence."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    @classmethod
    def gathered(cls, column: ColumnParallelLinear) -> ReplicatedLinear:
        """A linear with the rows of all ranks, on this rank's device: mcore's gather would put them
        on the CPU where the model is built on `meta`."""
        rows = column.weight.detach()
        whole = rows.new_empty(column.output_size, column.input_size)
        dist.all_gather(list(whole.split(len(rows))), rows, group=column.tp_group)
        return cls(whole)

    def forward(self, x):
        return F.linear(x, self.weight), None


def replicate_mla_down_projections(model: torch.nn.Module) -> None:
    """MLA's down projections, built column-parallel by the local spec, become whole.

    Upstream (`multi_latent_attention.py` of megatron-core) gathers their output without
    summing the gradient of the rotary key over the ranks' heads, so that under TP everything below
    would be trained on a partial gradient. TE's spec, which replicates them, is right.
    """
    require_version("megatron-core", WHO)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if isinstance(module := getattr(attention, name, None), ColumnParallelLinear):
                setattr(attention, name, ReplicatedLinear.gathered(module))


def localize(spec):
    """Replaces the leaves of a local block spec in place, and returns it."""
    require_version("megatron-core", WHO)
    if spec.layer_norm is WrappedTorchNorm:
        spec.layer_norm = local_norm
    distinct = {id(layer): layer for layer in spec.layer_specs}  # layers share one spec object
    for layer in distinct.values():
        _replace(layer.submodules)
        _replace(layer.submodules.self_attention.submodules)
        mlp = layer.submodules.mlp
        if isinstance(mlp, partial) and mlp.func is MoELayer:
            _replace_experts(mlp.keywords["submodules"])
    return spec


def _replace(submodules) -> None:
    leaves = {WrappedTorchNorm: local_norm, DotProductAttention: PackedAttention}
    for name, value in vars(submodules).items():
        if isinstance(value, type) and value in leaves:
            setattr(submodules, name, leaves[value])


def _replace_experts(moe_submodules) -> None:
    if getattr(moe_submodules.experts, "func", None) is not SequentialMLP:
        raise RuntimeError("mcore's local spec no longer builds SequentialMLP experts")
    leaves = GroupedMLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
    moe_submodules.experts = partial(TEGroupedMLP, submodules=leaves)


def place_experts(provider, column, row) -> None:
    """The models that Bridge's provider builds get these linears in their grouped experts."""
    block_spec, leaves = provider.transformer_layer_spec, GroupedMLPSubmodules(column, row)

    def spec(config, vp_stage=None):  # which Bridge looks for by name
        specs = block_spec(config, vp_stage=vp_stage)
        distinct = {id(layer): layer for layer in specs.layer_specs}  # layers share one object
        for layer in distinct.values():
            mlp = layer.submodules.mlp
            if isinstance(mlp, partial) and mlp.func is MoELayer:
                submodules = mlp.keywords["submodules"]
                if getattr(submodules.experts, "func", None) is not TEGroupedMLP:
                    raise RuntimeError("the spec does not build grouped experts")
                submodules.experts = partial(TEGroupedMLP, submodules=leaves)
        return specs

    provider.transformer_layer_spec = spec


def _rope_packed(
    t, cu_seqlens, freqs, rotary_interleaved=False, mla_rotary_interleaved=False, mscale=1.0,
    cp_group=None, multi_latent_attention=None,
):  # fmt: skip
    """One gather and one multiplication instead of a loop over sequences.

    Stands for `rope_utils._apply_rotary_pos_emb_thd` of megatron-core, whose loop costs
    more than the attention itself for many short sequences, and which knows no token whose prompt
    another sequence feeds. t `[F, heads, d]`; cu_seqlens: the tokens' positions, int64 `[F]`.
    """
    if cu_seqlens.shape != t.shape[:1]:
        raise ValueError(f"{len(cu_seqlens)} positions of {len(t)} tokens (PackedParams)")
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs[cu_seqlens],
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
    ).squeeze(1)


def _rope_whole(pos_emb, seq_dim, cp_group):
    """Stands for `get_pos_emb_on_this_cp_rank` in YaRN's module of megatron-core, which cuts what
    is not packed for context parallelism: of local modules that is only the cache that it makes as
    it is built, for fused kernels that are off, and it would want a GPU and whole chunks for it."""
    return pos_emb


_rope_upstream = rope_utils._apply_rotary_pos_emb_thd
_cut_upstream = rope_utils.get_pos_emb_on_this_cp_rank


def install() -> None:
    """Use the packed rotary embedding above. Raises ConfigError when mcore is another than we know,
    or would not call it."""
    require_version("megatron-core", WHO)
    require_parameters(_rope_upstream, tuple(inspect.signature(_rope_packed).parameters), WHO)
    caller = rope_utils.apply_rotary_pos_emb
    looked_up = "_apply_rotary_pos_emb_thd" in caller.__code__.co_names
    if not looked_up or caller.__globals__ is not vars(rope_utils):
        raise ConfigError(
            f"{WHO} expects rope_utils.apply_rotary_pos_emb to look up _apply_rotary_pos_emb_thd: "
            "the upstream code has changed"
        )
    for attention in (attention_module, mla_module):
        if attention.apply_rotary_pos_emb is not caller:
            raise ConfigError(
                f"{WHO} expects {attention.__name__} to use rope_utils.apply_rotary_pos_emb: the "
                "upstream code has changed"
            )
    require_parameters(_cut_upstream, tuple(inspect.signature(_rope_whole).parameters), WHO)
    if yarn_module.get_pos_emb_on_this_cp_rank not in (_cut_upstream, _rope_whole):
        raise ConfigError(f"{WHO} expects {yarn_module.__name__} to use {_cut_upstream.__name__}")
    yarn_module.get_pos_emb_on_this_cp_rank = _rope_whole
    rope_utils._apply_rotary_pos_emb_thd = _rope_packed
