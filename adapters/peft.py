"""Writes an adapter as a PEFT directory: `adapter_model.safetensors` and `adapter_config.json`.

Routed experts are written one by one (`mlp.experts.7.gate_proj.lora_A.weight`), the form that vLLM
and Megatron-Bridge read. Ranks that differ between modules go into `rank_pattern`. vLLM ignores
`rank_pattern` and `alpha_pattern` and scales every module by the one `lora_alpha / r`, so that the
patterns are written to give each module that same scale, and what a module's own scale differs from
it by is folded into its B: PEFT and vLLM then compute the same function.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lora_moe_rl.adapters.families import hf_path
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.config import RunConfig

# Canonical module -> Hugging Face path below `model.layers.N`.
HF_PATHS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_a_proj": "self_attn.q_a_proj",
    "q_b_proj": "self_attn.q_b_proj",
    "kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "shared_expert.gate": "mlp.shared_experts.gate_proj",
    "shared_expert.up": "mlp.shared_experts.up_proj",
    "shared_expert.down": "mlp.shared_experts.down_proj",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
}


def write(
    directory: Path, spec: AdapterSpec, tensors: Mapping[str, np.ndarray], config: RunConfig
) -> None:
    """Replaces `directory` as a whole; an interrupted write leaves the old one."""
    fresh = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(dict(peft_tensors(spec, tensors)), fresh / "adapter_model.safetensors")
    text = json.dumps(peft_config(spec, config), indent=2)
    (fresh / "adapter_config.json").write_text(text + "\n")
    old = directory.with_name(f"{directory.name}.old-{os.getpid()}")
    if directory.exists():
        os.replace(directory, old)
    os.replace(fresh, directory)
    shutil.rmtree(old, ignore_errors=True)


def peft_tensors(
    spec: AdapterSpec, tensors: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """(PEFT key, float32 array) of every site, and of every expert of a routed site."""
    common = _first(spec).scale
    for site in spec:
        for matrix in ("A", "B"):
            whole = tensors[f"{site.name}.{matrix}"]
            if matrix == "B" and site.scale != common:
                whole = whole * np.float32(site.scale / common)
            for path, values in _paths(spec, site, whole):
                key = f"base_model.model.{path}.lora_{matrix}.weight"
                yield key, np.ascontiguousarray(values, dtype=np.float32)


def _paths(spec: AdapterSpec, site: Site, whole: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    path = f"model.layers.{site.layer}.{hf_path(spec.shape, site.module)}"
    if site.num_experts is None:
        yield path, whole
    else:
        for expert in range(site.num_experts):
            yield path.format(expert), whole[expert]


def peft_config(spec: AdapterSpec, config: RunConfig) -> dict:
    """`adapter_config.json`. `r` and `lora_alpha` are those of the modules outside the experts,
    where there are any."""
    first = _first(spec)
    ranks = {
        rf".*\.{hf_path(spec.shape, site.module)}".replace("{}", r"\d+"): site.rank
        for site in spec
        if site.rank != first.rank
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": first.rank,
        "lora_alpha": first.scale * first.rank,
        "rank_pattern": ranks,
        "alpha_pattern": {pattern: first.scale * rank for pattern, rank in ranks.items()},
        "target_modules": sorted(
            {hf_path(spec.shape, site.module).rpartition(".")[2] for site in spec}
        ),
        "use_rslora": False,  # its scale is in lora_alpha
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "revision": None,
    }


def _first(spec: AdapterSpec) -> Site:
    """The site that gives the common rank and scale."""
    return min(spec, key=lambda site: site.num_experts is not None)
