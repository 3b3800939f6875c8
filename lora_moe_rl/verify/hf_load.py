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
from typing import Any

import torch
import transformers

from lora_moe_rl.adapters.families import FAMILIES, Family, language_config
from lora_moe_rl.errors import ModelError
from lora_moe_rl.export.merged import dequantise
from lora_moe_rl.files.untrusted import SafeWeights


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
    name = architecture if inside is None else inside.architecture
    model_class = getattr(transformers, name, None) or reference_class(family)
    model_type = family.model_types[0] if inside is None else inside.model_type
    keys = family.reference_keys(config) | {"model_type": model_type}
    settings = model_class.config_class.from_dict(config | keys)
    if family.reference_class is None:
        model = model_class.from_pretrained(model_dir, config=settings, dtype=torch.float32)
    else:  # of older code: transformers 5 would draw its weights anew, and lose its buffers
        model = model_class(settings).float()
        with SafeWeights.open(model_dir) as weights:
            model.load_state_dict({name: weights.read(name) for name in weights.file_of})
    for layer in model.model.layers:
        if hasattr(getattr(layer, "self_attn", None), "kv_a_layernorm"):
            _mend_mla_norms(layer.self_attn, settings.rms_norm_eps)
        if family.mend_reference is not None:
            family.mend_reference(layer, settings)
    return model.eval()


def reference_class(family: Family) -> Any:
    """Of a family that transformers does not know."""
    if family.reference_class is None:
        raise ModelError(f"transformers {transformers.__version__} has no {family.architecture}")
    return family.reference_class()


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
