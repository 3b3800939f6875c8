"""Builds the frozen base as a Megatron-core `GPTModel` and loads its Hugging Face weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from lora_moe_rl.adapters.families import FAMILIES
from lora_moe_rl.adapters.sharding import pipeline_chunks
from lora_moe_rl.base.shared import Shared
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.trainer.device import Device
from lora_moe_rl.trainer.rendezvous import join

# mcore and Bridge options that need CUDA kernels, and training extras that a frozen base has no
# use for. Everything else is Bridge's reading of the model's config.json.
_LOCAL = {
    "moe_permute_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "transformer_impl": "local",
    "experimental_attention_variant": None,  # which local specs refuse: linear_attention.py
}
_ALWAYS = {
    "gradient_accumulation_fusion": False,  # frozen weights have no gradients
    "moe_shared_expert_overlap": False,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_fusion": False,  # the fused router bypasses replay
    "moe_token_dispatcher_type": "alltoall",  # the one whose map the audit of replay reads
    "moe_enable_routing_replay": True,
    "attention_softmax_in_fp32": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "calculate_per_token_loss": True,
    "mtp_num_layers": None,
    # A vocabulary that tp does not divide is padded to a multiple of tp, no further.
    "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 1,
    "deallocate_pipeline_outputs": False,
    "perform_initialization": False,  # every weight is loaded; the bridge checks that each is
}


def init_process_groups(config: TrainerConfig, device: Device, rank: int, address: str) -> None:
    """torch.distributed and Megatron's groups. `address`: host:port of rank 0."""
    join(device.backend, rank, config.world_size, address)
    init_model_parallel(config)


def init_model_parallel(config: TrainerConfig, **options) -> None:
    """Megatron's groups, in the world that torch.distributed has."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    ps.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        **options,
    )
    model_parallel_cuda_manual_seed(1)


def build_model(
    model_dir: Path,
    config: TrainerConfig,
    num_layers: int,
    device: Device,
    shared: Shared | None = None,
) -> list[torch.nn.Module]:
    """This rank's part of the frozen base, in `device.dtype`, ready for adapters: `config.vpp`
    chunks in the order the micro-batches go through them. `shared`: what engines hold too, of
    which this rank makes no copy."""
    from lora_moe_rl.trainer import bridge

    logging.getLogger("megatron").setLevel(logging.ERROR)
    bridge.load()
    from lora_moe_rl.trainer import (
        fp8_forward,
        packed_dense,
        packed_experts,
        shared_dense,
        shared_experts,
    )

    packed = packed_experts.find(model_dir)
    dense = None if shared is None else shared_dense.SharedDense(shared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = bridge.source_of(model_dir, device.dtype)
        provider = make_provider(source, config, num_layers, device)
        if packed is not None:
            packed.place(provider, later=shared is not None)
        elif shared is not None:
            shared_experts.place(provider, source.hf_pretrained.config)
        if dense is not None:
            dense.place(provider, source.hf_pretrained.config)
        chunks = provide(provider, device)
    if packed is not None:
        packed.load(chunks, shared)
    elif shared is not None:
        shared_experts.load(chunks, shared)
    if dense is not None:
        dense.finish()
    replicate(chunks, config, device)
    if packed is not None:
        packed_dense.pack(chunks, model_dir)
    if config.fp8_forward == "engine":
        fp8_forward.install(chunks, model_dir)
    return list(chunks)


def provide(provider, device: Device) -> list[torch.nn.Module]:
    """The chunks of a provider's model on this rank."""
    return provider.provide_distributed_model(
        wrap_with_ddp=False,
        use_cpu_initialization=device.kind == "cpu",
        fp16=False,
        bf16=device.dtype is torch.bfloat16,
    )


def replicate(chunks: Sequence[torch.nn.Module], config: TrainerConfig, device: Device) -> None:
    """Makes whole, on every tensor-parallel rank, what the local spec cuts and should not."""
    if not device.transformer_engine and config.tp > 1:
        from lora_moe_rl.trainer.local_modules import replicate_mla_down_projections

        for chunk in chunks:
            replicate_mla_down_projections(getattr(chunk, "module", chunk))


def make_provider(source, config: TrainerConfig, num_layers: int, device: Device, load=True):
    """Bridge's provider of the model `source` (an AutoBridge), with our options. `load`: whether
    the models that it builds load their weights."""
    provider = source.to_megatron_provider(load_weights=load)
    bf16 = device.dtype is torch.bfloat16
    options = dict(_ALWAYS)
    if not device.transformer_engine:
        from lora_moe_rl.trainer import local_modules

        local_modules.install()
        options |= _LOCAL | {"transformer_layer_spec": _local_spec}
    # Of a model without weights it is the config itself.
    hf_config = getattr(source.hf_pretrained, "config", source.hf_pretrained)
    family = FAMILIES[hf_config.architectures[0]]
    if family.norm_over_heads:
        from lora_moe_rl.trainer import norm_over_heads

        spec = options.get("transformer_layer_spec", norm_over_heads.with_engine)
        options["transformer_layer_spec"] = norm_over_heads.placed(spec)
    options |= {
        "tensor_model_parallel_size": config.tp,
        "pipeline_model_parallel_size": config.pp,
        "context_parallel_size": config.cp,
        "expert_model_parallel_size": config.ep,
        "expert_tensor_parallel_size": config.etp,
        "virtual_pipeline_model_parallel_size": config.vpp if config.vpp > 1 else None,
        # Interleaved over two ranks, tensors and shapes of both directions would go to one peer in
        # an order that each side reads otherwise (`p2p_communication.py` of megatron-core).
        "variable_seq_lengths": config.vpp == 1,
        "overlap_p2p_comm": config.vpp > 1,
        "batch_p2p_comm": config.vpp == 1,
        "pipeline_model_parallel_layout": _pipeline_layout(num_layers, config),
        "sequence_parallel": config.tp > 1,
        "params_dtype": device.dtype,
        "pipeline_dtype": device.dtype,
        "bf16": bf16,
        "fp16": False,
        "use_cpu_initialization": device.kind == "cpu",
    }
    if config.recompute == "full":
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    for name, value in options.items():
        if not hasattr(provider, name):
            raise RuntimeError(f"Megatron-Bridge's provider has no option {name} any more")
        setattr(provider, name, value)
    provider.finalize()
    if family.router == "corrected_softmax":
        from lora_moe_rl.trainer import corrected_softmax

        corrected_softmax.install(provider)
    return provider


def _pipeline_layout(num_layers: int, config: TrainerConfig) -> list[list[str]] | None:
    """mcore's form of `pipeline_chunks`."""
    if config.pp == 1:
        return None
    chunks = [["decoder"] * n for n in pipeline_chunks(num_layers, config.pp * config.vpp)]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]


def _local_spec(config, vp_stage=None):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from lora_moe_rl.trainer.linear_attention import with_linear_attention
    from lora_moe_rl.trainer.local_modules import localize
    from lora_moe_rl.trainer.mla_query import without_query_norm

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    spec = localize(without_query_norm(spec, config))
    return with_linear_attention(spec, config, vp_stage)
