"""Hugging Face's model as the reference, where transformers 5.12.1 computes what was trained.

Mended: the norms inside MLA have an epsilon of 1e-6 whatever config.json says, where Megatron-core
and vLLM take `rms_norm_eps`; and what a family's file mends (`mend_reference`, `reference_keys`).
Under a model_type that transformers does not know, kimi_k2, the experts of a checkpoint would not
be found.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformers

from lora_moe_rl.adapters.families import FAMILIES, language_config
from lora_moe_rl.export.merged import dequantise


def load(model_dir: Path) -> torch.nn.Module:
    """The model of a Hugging Face directory, in float32 on the CPU. A quantised one is dequantised
    on the disk first: transformers stacks experts, and knows no quantised stacks."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    if "quantization_config" in config:
        with tempfile.TemporaryDirectory() as folder:
            dequantise(Path(model_dir), numbers := Path(folder) / "numbers", "float32")
            return load(numbers)
    (architecture,) = config["architectures"]
    family, inside = FAMILIES[architecture], FAMILIES[architecture].inside
    config = dict(language_config(config))
    model_class = getattr(transformers, architecture if inside is None else inside.architecture)
    model_type = family.model_types[0] if inside is None else inside.model_type
    keys = family.reference_keys(config) | {"model_type": model_type}
    settings = model_class.config_class.from_dict(config | keys)
    model = model_class.from_pretrained(model_dir, config=settings, dtype=torch.float32)
    for layer in model.model.layers:
        if hasattr(getattr(layer, "self_attn", None), "kv_a_layernorm"):
            _mend_mla_norms(layer.self_attn, settings.rms_norm_eps)
        if family.mend_reference is not None:
            family.mend_reference(layer, settings)
    return model.eval()


def load_whole(model_dir: Path) -> torch.nn.Module:
    """The model, as `load`; where a language model stands inside a larger one, the larger one."""
    (architecture,) = json.loads((Path(model_dir) / "config.json").read_text())["architectures"]
    if FAMILIES[architecture].inside is None:
        return load(model_dir)
    model_class = getattr(transformers, architecture)
    return model_class.from_pretrained(model_dir, dtype=torch.float32).eval()


def _mend_mla_norms(attention: torch.nn.Module, eps: float) -> None:
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if (norm := getattr(attention, name, None)) is not None:
            norm.variance_epsilon = eps
