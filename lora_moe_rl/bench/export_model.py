"""Synthetic checkpoints of `bench export`: DeepSeek-V3's names and layout, several shards.

Weights are slices of one random block. `bf16` is plain; `fp8` and `int4` quantise the linears as
DeepSeek-V3 and Kimi-K2-Thinking do (norms, router, embeddings stay bfloat16).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.files.untrusted import SafeFile
from lora_moe_rl.kernels.merge import formats

SHARD_BYTES = 10**9
RANK = 32
POOL = 2**26  # random numbers
SCALE = 0.02
QUANTISED = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32},
            }
        },
    },
}
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, layers: int, form: str) -> int:
    """Returns the bytes of the shards."""
    folder.mkdir(parents=True)
    config = CONFIG | {"num_hidden_layers": layers}
    if form in QUANTISED:
        config["quantization_config"] = QUANTISED[form]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shape = ModelShape.from_hf_config(config)
    shards: list[dict[str, torch.Tensor]] = [{}]
    written: list[tuple[str, list[str]]] = []
    size = total = 0
    for name, tensor in _tensors(shape, form):
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            written.append(_save(folder, len(written), shards.pop()))
            shards, size = [{}], 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    written.append(_save(folder, len(written), shards.pop()))
    weight_map = {}
    for number, (old, names) in enumerate(written, 1):
        new = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        (folder / old).rename(folder / new)
        weight_map |= dict.fromkeys(names, new)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _save(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> tuple[str, list[str]]:
    name = f"{number}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return name, list(tensors)


def _tensors(shape: ModelShape, form: str) -> Iterator[tuple[str, torch.Tensor]]:
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * SCALE
    taken = 0

    def draw(*size: int) -> torch.Tensor:
        nonlocal taken
        count = int(np.prod(size))
        first = taken % (POOL - count + 1)
        taken += 7919 * 64
        return pool[first : first + count].view(size)

    def plain(*size: int) -> torch.Tensor:
        return draw(*size).to(torch.bfloat16)

    hidden, d = shape.hidden_size, shape.dims
    yield "model.embed_tokens.weight", plain(shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for module, (in_features, out_features, experts) in shape.modules(layer).items():
            path = f"{prefix}.{hf_path(shape, module)}"
            for expert in range(experts or 1):
                weight = draw(out_features, in_features)
                yield from _linear(path.format(expert), weight, form)
        if layer in shape.moe_layers:
            yield f"{prefix}.mlp.gate.weight", plain(shape.num_experts, hidden)
            bias = f"{prefix}.mlp.gate.e_score_correction_bias"
            yield bias, draw(shape.num_experts).clone()
        yield f"{prefix}.input_layernorm.weight", plain(hidden) + 1
        yield f"{prefix}.post_attention_layernorm.weight", plain(hidden) + 1
        yield f"{prefix}.self_attn.q_a_layernorm.weight", plain(d["q_lora_rank"]) + 1
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", plain(d["kv_lora_rank"]) + 1
    yield "model.norm.weight", plain(hidden) + 1
    yield "lm_head.weight", plain(shape.vocab_size, hidden)


def _linear(path: str, weight: torch.Tensor, form: str) -> Iterator[tuple[str, torch.Tensor]]:
    if form == "bf16":
        yield f"{path}.weight", weight.to(torch.bfloat16)
    elif form == "fp8":
        quantised, scale = formats.quantise_fp8(weight)
        yield f"{path}.weight", quantised
        yield f"{path}.weight_scale_inv", scale
    else:
        packed, scale = formats.quantise_int4(weight, torch.bfloat16)
        yield f"{path}.weight_packed", packed
        yield f"{path}.weight_scale", scale
        yield f"{path}.weight_shape", torch.tensor(weight.shape)


def spec_of(folder: Path) -> AdapterSpec:
    shape = ModelShape.from_hf_config(json.loads((folder / "config.json").read_text()))
    return AdapterSpec.build(shape, AdapterConfig(rank=RANK, alpha=2.0 * RANK))


def write_adapter(path: Path, spec: AdapterSpec) -> None:
    """Canonical float32 tensors; the change is about a hundredth of the weights."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.02 if name.endswith("A") else 1e-3)
        for name, shape in spec.tensor_shapes.items()
    }
    save_file(tensors, path)


class FileTensors(Mapping[str, np.ndarray]):
    """Tensors of a file, each read when it is asked for."""

    def __init__(self, path: Path):
        self.file = SafeFile.open(path)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.file.read(name).numpy()

    def __iter__(self) -> Iterator[str]:
        return iter(self.file.entries)

    def __len__(self) -> int:
        return len(self.file.entries)
