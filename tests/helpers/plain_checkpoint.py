"""A checkpoint small enough to lay out by hand: a Qwen3-MoE without norms and routers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from lora_moe_rl.tiny.shapes import SHAPES

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 3, 8, 6
VOCABULARY, QUERIES, KEYS = 70, 4 * 32, 2 * 32  # q, k and v of the tiny shape


def save_plain(folder: Path) -> Path:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}
    sizes |= {"vocab_size": VOCABULARY}
    config = AutoConfig.for_model(
        "qwen3_moe", **SHAPES["qwen3_moe"] | sizes | {"num_hidden_layers": LAYERS}
    )
    folder.mkdir()
    whole = config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(whole))
    torch.manual_seed(0)
    vocabulary = ("model.embed_tokens", "lm_head")
    tensors = {f"{name}.weight": torch.randn(VOCABULARY, HIDDEN) for name in vocabulary}
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        for name, rows in (("q", QUERIES), ("k", KEYS), ("v", KEYS)):
            tensors[f"{attention}.{name}_proj.weight"] = torch.randn(rows, HIDDEN)
        tensors[f"{attention}.o_proj.weight"] = torch.randn(HIDDEN, QUERIES)
        for expert in range(EXPERTS):
            path = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors[f"{path}.gate_proj.weight"] = torch.randn(WIDTH, HIDDEN)
            tensors[f"{path}.up_proj.weight"] = torch.randn(WIDTH, HIDDEN)
            tensors[f"{path}.down_proj.weight"] = torch.randn(HIDDEN, WIDTH)
    save_file(tensors, folder / "model.safetensors")
    return folder
